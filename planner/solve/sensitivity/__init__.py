"""The value of a plan when its inputs are wrong or only roughly known."""
