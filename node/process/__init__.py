"""Processes of a node: how they start, start again, and end."""
