"""Results of benchmarks as their tools write them, made up by hand."""


def vllm(prompt=8_000, ttft_ms=700.0, running=1, step_ms=25.0, output=201, completed=10, **changes):
    """Of `vllm bench serve --save-result` with so many requests at once."""
    e2e_ms = ttft_ms + step_ms * (output - 1)
    return {
        "date": "20261101-120000", "backend": "vllm", "model_id": "m", "num_prompts": completed, "request_rate": "inf",
        "burstiness": 1.0, "max_concurrency": running, "duration": completed * e2e_ms / 1000 / running, "completed": completed,
        "failed": 0, "total_input_tokens": completed * prompt, "total_output_tokens": completed * output,
        "mean_ttft_ms": ttft_ms, "median_ttft_ms": ttft_ms, "std_ttft_ms": 0.03 * ttft_ms, "p99_ttft_ms": 1.1 * ttft_ms,
        "mean_tpot_ms": step_ms, "median_tpot_ms": step_ms, "std_tpot_ms": 0.1, "median_itl_ms": step_ms,
    } | changes  # fmt: skip


def sglang(**fields):
    """Of `bench_serving`, one line of its file."""
    table = vllm(**fields)
    running = table["max_concurrency"]
    return table | {"backend": "sglang", "concurrency": 0.99 * running, "mean_e2e_latency_ms": 5_725.0}


def guidellm(*loads):
    """A report of GuideLLM with a benchmark for each (prompt tokens, TTFT in ms, requests at once, step in ms)."""

    def spread(value):
        return {"successful": {"mean": value, "median": value, "std_dev": 0.02 * value, "count": 20}}

    return {
        "metadata": {"guidellm_version": "0.5.0"},
        "benchmarks": [
            {
                "config": {"strategy": {"type_": "concurrent", "streams": running}},
                "metrics": {
                    "request_totals": {"successful": 20, "errored": 0, "incomplete": 1, "total": 21},
                    "request_concurrency": spread(running), "prompt_token_count": spread(prompt),
                    "output_token_count": spread(201), "time_to_first_token_ms": spread(ttft_ms),
                    "inter_token_latency_ms": spread(step_ms), "request_latency": spread((ttft_ms + 200 * step_ms) / 1000),
                },
            }
            for prompt, ttft_ms, running, step_ms in loads
        ],
    }  # fmt: skip


LENGTHS = ((1_000, 120.0), (8_000, 700.0), (32_000, 3_100.0), (100_000, 12_500.0))
BATCHES = ((16, 30.0), (64, 45.0))
SWEEP = [vllm(prompt=n, ttft_ms=t) for n, t in LENGTHS] + [
    vllm(prompt=2_000, ttft_ms=900.0, running=b, step_ms=s, completed=100) for b, s in BATCHES
]
AIC_COLUMNS = "model,isl,osl,prefix,concurrency,request_rate,bs,global_bs,ttft,tpot,tp,pp,dp,backend,system,memory"
