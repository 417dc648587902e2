"""The sending end: one client for all peers, one scheduler and several lanes for each of them.

client       all peers
peer         one address: its transfers, its lanes, the link to it
lane         a thread, its connections, and what it writes
schedule     what leaves next
"""
