"""Turns a client's request into the tokens of its prompt. The gateway, which names blocks, and engines share it.

conversations     a chat that goes on: only what is new is read
reading           a request's prompt, as gateway and engine both read it
tokens            text to tokens
chat              messages to text
"""
