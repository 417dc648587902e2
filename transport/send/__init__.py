"""The sending end: one client for all peers, one scheduler and several streams for each of them."""
