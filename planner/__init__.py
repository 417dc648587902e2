"""Numbers in, decisions out: routing, placement, admission, planning. Pure."""
