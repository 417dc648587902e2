"""Which requests are let in, when, and which wait: promises, limits of tenants, the queue."""
