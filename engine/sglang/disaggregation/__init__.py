"""SGLang's disaggregated prefill and decode over the agents of two nodes."""
