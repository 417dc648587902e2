"""Which node holds which prefix."""
