"""Results of load generators and estimators, read into one kind of value."""
