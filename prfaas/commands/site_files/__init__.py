"""What `prfaas init` writes beside the files of nodes and gateway."""
