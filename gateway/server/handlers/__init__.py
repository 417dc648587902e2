"""Handlers of paths that generate nothing."""
