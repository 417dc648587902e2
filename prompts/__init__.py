"""From what a client wrote to the tokens of its prompt: the same for the gateway, which names them, and for engines.

conversations     a chat that goes on: only what is new is read
reading           a request's prompt, as gateway and engine both read it
tokens            text to tokens
chat              messages to text
"""
