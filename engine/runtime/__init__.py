"""What every engine needs between a request and a model: scheduler, batch, sampling, text."""
