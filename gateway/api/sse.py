"""Marks of server-sent events in answers of OpenAI's shape."""

from typing import Final

ERROR: Final = b'data: {"error"'
EVENT_END: Final = b"\n\n"
DATA: Final = b"data: "
DONE: Final = b"data: [DONE]\n\n"
