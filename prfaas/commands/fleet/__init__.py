"""Which nodes a gateway has, as its file and its registries list them."""
