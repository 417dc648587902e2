"""The long timescale: which threshold and which prefill/decode split a site should have."""
