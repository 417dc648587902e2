"""Which nodes the gateway has, as registries list them."""
