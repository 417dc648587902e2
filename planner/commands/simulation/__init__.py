"""Commands that run plans in virtual time."""
