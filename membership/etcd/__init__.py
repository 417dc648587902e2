"""A registry in etcd: nodes list themselves there under leases, operators add others, and gateways watch."""
