"""Predicts the time of work from earlier work, and tracks the errors of predictions."""
