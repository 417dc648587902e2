"""Connections of clients: listeners, bodies in, responses out."""
