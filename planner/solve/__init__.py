"""The long timescale: which threshold and which prefill/decode split a site should have.

control │ plan               what a running system should change; what a site should be
objectives │ sensitivity     what a site costs; inputs that may be wrong
aims                         what plans are compared by: the rate, or the rate within a target
loaded, problem, search      queues, a site as numbers, the exact search
fleet                        several clusters of a kind
"""
