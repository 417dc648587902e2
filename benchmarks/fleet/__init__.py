"""Fleets of many nodes, clusters and gateways, in one process: the gateway's own code, and nodes that say what they would."""
