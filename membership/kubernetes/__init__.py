"""A registry in Kubernetes: nodes are Pods, described by labels and annotations, and gateways watch the API server."""
