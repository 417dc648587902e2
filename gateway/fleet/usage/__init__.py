"""Tenants' usage, summed over all gateways of a fleet, and kept when they end."""
