"""From the bytes of a call to the tokens and block hashes of its prompt."""
