"""The short timescale: what a gateway decides per request. Gateway and simulator call the same functions.

routing │ admission │ failures │ plans     where to, when, what follows a failure, which plan holds
estimates │ links                          what work takes, which links are used
views                                      nodes, links and the request, as values
"""
