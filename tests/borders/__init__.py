"""Two sites in network namespaces, and what a listener between them sees."""
