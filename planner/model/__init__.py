"""What planning knows of the world: hardware profiles, traffic, sites, and the equations over them."""
