"""Which nodes a fleet has: read from a registry that lives, by gateways and commands; written by nodes and operators."""
