"""`prfaas check`: what it asks of a site, and what it makes of the answers."""
