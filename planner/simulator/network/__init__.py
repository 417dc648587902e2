"""Links under simulation, and what crosses them."""
