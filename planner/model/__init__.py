"""The planner's model of the world: hardware profiles, traffic, sites, and the equations over them."""
