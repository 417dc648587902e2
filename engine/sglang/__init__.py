"""SGLang's hierarchical cache over the pages of a node's agent."""
