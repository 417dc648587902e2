"""Files of requests, read row by row into columns: what a row means, and what is kept of it."""
