"""The HTTP API as values: what bodies may say, and the dialects that it is spoken in."""
