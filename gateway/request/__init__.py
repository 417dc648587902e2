"""One request as values: what it is, when things happened to it, the record that stays."""
