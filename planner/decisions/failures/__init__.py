"""Decides what follows a failure, and which requests cause failures."""
