"""The command line `prfaas-plan`: one file per command."""
