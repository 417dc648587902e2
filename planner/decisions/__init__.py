"""The short timescale: what a gateway decides per request. Gateway and simulator call the same functions."""
