"""Commands that solve a site."""
