"""Profiles made of what people have: a model's config.json, and results of load generators."""
