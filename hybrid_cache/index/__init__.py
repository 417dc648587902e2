"""The index: which node holds which prefix."""
