"""A discrete-event judge for plans: the real routing, placement, admission, controller and cache code in virtual time."""
