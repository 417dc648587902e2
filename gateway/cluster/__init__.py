"""What the gateway knows of nodes and links, and how it speaks to agents."""
