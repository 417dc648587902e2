"""One request's life inside an engine, and answers as prefix cache."""
