"""What users ask for: the load over a week, and how soon answers must begin."""
