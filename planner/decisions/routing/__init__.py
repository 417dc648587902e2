"""Local or remote, and on which nodes: what a decision compares, and how it is explained."""
