"""From what a client wrote to the tokens of its prompt: the same for the gateway, which names them, and for engines."""
