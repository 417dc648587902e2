"""An engine without a model: real protocol and pages, times by the clock."""
