"""How many descriptors this process may have: one for each connection."""

import resource


def raise_descriptor_limit() -> None:
    """As many descriptors as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """How many that are now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
