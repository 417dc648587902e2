"""Connections of a listener, from the handshake to the last chunk."""
