"""The plan that gateways follow, what they report to its planner, and which nodes may change their role."""
