"""The planner's speed."""
