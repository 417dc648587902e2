"""The plan service: watches running gateways, re-solves, and publishes plans that they follow."""
