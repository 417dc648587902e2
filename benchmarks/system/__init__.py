"""Whole systems that run: the case study, placements, disturbances, overload, agents."""
