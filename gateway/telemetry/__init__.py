"""What is told of requests: metrics, records, logs, traces, usage."""
