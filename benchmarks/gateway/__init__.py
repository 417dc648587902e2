"""CPU and memory of the gateway per request, beside peers."""
