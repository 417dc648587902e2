"""A discrete-event judge for plans: the real routing, placement, admission, controller and cache code in virtual time.

trials                                        a plan over several seeds, and against others
world                                         one run of a scenario
gateway │ clusters │ turns, network, nodes    who decides, what crosses links, what computes
outcome, scenario, policies                   what came out, what is simulated
loop │ sharing                                virtual time
"""
