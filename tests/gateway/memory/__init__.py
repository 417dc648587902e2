"""A gateway's pipeline without sockets, processes or waiting: bytes stay in memory, time passes when nothing else does."""
