"""The steps of a request, from its decision to its last byte."""
