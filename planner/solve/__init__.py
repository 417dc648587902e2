"""The long timescale: which threshold and which prefill/decode split a site should have.

control │ plan               what a running system should change; what a site should be
objectives │ sensitivity     other goals than the highest rate; inputs that may be wrong
loaded, problem, search      queues, a site as numbers, the exact search
fleet                        several clusters of a kind
"""
