"""A fleet under churn: nodes, gateways and registries that come, go, stop and move while clients ask."""
