"""Which version of the planner made a plan."""


def tool_version() -> str:
    """Version of the installed distribution."""
    # A tenth of a second to load, and most commands do not say it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("prfaas")
    except PackageNotFoundError:
        return "unknown"
