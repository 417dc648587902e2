"""Plans on trial: runs over several seeds, comparisons, the largest rate within an SLO."""
