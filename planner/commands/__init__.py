"""The command line `prfaas-plan`: one module per command, in one folder per subject."""
