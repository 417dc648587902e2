"""Results as text, JSON, CSV, charts and HTML."""
