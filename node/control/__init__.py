"""Calls of gateways over kept connections, and events for those who watch the node."""
