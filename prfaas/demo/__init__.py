"""The demo: both clusters on one machine, a replayed trace, and its checks."""
