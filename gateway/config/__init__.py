"""The gateway's configuration, checked where it is read."""
