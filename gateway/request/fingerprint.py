"""What kind of request a call is: the fields that it sets, what kind of value they have, how long its prompt is."""

import re
from typing import Final, NamedTuple

from gateway.api.openai import OPTIONS, Call, Endpoint

# They say whose a request is or what it is about, not what an engine is to do.
CONTENTS: Final = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "user",
        "metadata",
        "cache_salt",
        "prompt_cache_key",
        "stream_options",
        "request_id",
    }
)
_KINDS: Final = re.compile(rb'"type"\s*:\s*"(\w{1,32})"')
# Names that engines know, beside those that the gateway checks. Any other is the client's invention: shapes by such names could
# be as many as a client likes, and what is known of real ones would be pushed out.
KNOWN: Final = frozenset(
    {name for options in OPTIONS.values() for name in options.__struct_fields__}
    | {
        "allowed_token_ids", "bad_words", "chat_template_kwargs", "documents", "functions", "guided_choice", "guided_grammar",
        "guided_json", "guided_regex", "ignore_eos", "include_stop_str_in_output", "length_penalty", "logits_processors",
        "mm_processor_kwargs", "priority", "reasoning_effort", "return_token_ids", "return_tokens_as_token_ids",
        "skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids", "structured_outputs", "suffix", "tools",
        "truncate_prompt_tokens", "use_beam_search", "vllm_xargs",
    }
)  # fmt: skip


class RequestShape(NamedTuple):
    """`options` are names of fields, some with a kind; `size` is the bit length of the number of prompt tokens."""

    endpoint: Endpoint
    options: frozenset[str]
    size: int

    def __str__(self) -> str:
        most = (1 << self.size) - 1
        return f"{self.endpoint}, {', '.join(sorted(self.options)) or 'no options'}, up to {most} tokens"


def shape_of(call: Call, num_tokens: int) -> RequestShape:
    """The shape of a call whose prompt has so many tokens."""
    fields = call.fields.keys() - CONTENTS
    options = fields & KNOWN
    if len(options) < len(fields):
        options.add("…")
    if call.options.temperature == 0:
        options.add("temperature=0")
    for name in ("response_format", "tool_choice"):
        if name in options and (kind := _KINDS.search(bytes(call.fields[name]))):
            options.add(f"{name}={kind[1].decode()}")
    return RequestShape(call.endpoint, frozenset(options), num_tokens.bit_length())
