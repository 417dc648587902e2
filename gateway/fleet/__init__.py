"""What several gateways decide together, each for itself."""
