"""The parts of every engine between a request and a model: scheduler, batch, sampling, text."""
