"""Lists the fields that a pair of servers ignores or gets wrong. Gateways refuse them before they ask a server."""

from typing import Any, Final

import msgspec

NOTHING: Final[tuple[Any, ...]] = (None, False, 0, [], {}, "")
# Of a prompt's own log probabilities the prefill server knows and the decode server answers; names of requests, sessions and
# ranks are given by what pairs the servers; `extra_key` and adapters name caches that no gateway knows.
FIELDS: Final = (
    "prompt_logprobs", "echo", "suffix", "return_hidden_states", "return_routed_experts", "return_meta_info",
    "rid", "session_id", "session_params", "routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank",
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "lora_path", "extra_key", "custom_logit_processor", "watermark",
)  # fmt: skip


def not_done_json() -> str:
    """The fields, each with the values that ask for nothing, as a JSON object."""
    return msgspec.json.encode(dict.fromkeys(FIELDS, NOTHING)).decode()
