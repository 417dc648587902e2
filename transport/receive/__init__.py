"""The receiving end: one listener for all peers, and the registry of what it expects.

server         the listener
connection     from the handshake to the last chunk, a thread each
registry       what is expected, and which connections are known
"""
