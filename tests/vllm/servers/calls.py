"""Calls as clients make them; a gateway has to answer each as one vLLM server does; and what counts as equal."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.vllm.harness import prompt_of

CHAT, COMPLETIONS = "chat/completions", "completions"
LENGTH: Final = 140  # tokens: more than a chunk would be slow, fewer than a block would not travel
GREEDY: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SAMPLED: Final[dict[str, Any]] = {"temperature": 0.8, "max_tokens": 12, "ignore_eos": True, "seed": 7}
LOGPROB_TOLERANCE: Final = 2e-3  # float32, cut at other places

WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["c", "f"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Final = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["utc", "cet"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
VERDICT: Final = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "stars": {"enum": [1, 2, 3, 4, 5]}},
    "required": ["good", "stars"],
    "additionalProperties": False,
}
FINITE: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 80}  # what is asked for has an end


@dataclass(frozen=True)
class Call:
    """`is_shared`: whether its KVCache is that of its tokens alone, so that a node of the other cluster computes it. `answers`
    are asked for at once.
    """

    name: str
    endpoint: str
    body: dict[str, Any]
    is_shared: bool = True
    answers: int = 1


def calls() -> list[Call]:
    """All of them, no two with the beginning of a prompt in common."""
    return [*_streamed(_completions()), *_streamed(_chats()), *_streamed(_several())]


def _streamed(made: Iterator[Call]) -> Iterator[Call]:
    """Each as it is, and of another prompt as a stream."""
    for call in made:
        yield call
        if "prompt_logprobs" in call.body:  # which vLLM has not in streams
            continue
        options = {"stream": True, "stream_options": {"include_usage": True}}
        yield replace(call, name=f"{call.name}, streamed", body=_of_another_prompt(call.body) | options)


def _of_another_prompt(body: dict[str, Any]) -> dict[str, Any]:
    """Which has nothing in common with the first one, so that caches are of no use."""
    if "messages" in body:
        first, *rest = body["messages"]
        return body | {"messages": [first | {"content": f"Again: {first['content']}"}, *rest]}
    return body | {"prompt": _another(body["prompt"])}


def _another(prompt: Any) -> Any:
    if isinstance(prompt[0], int):
        return prompt[::-1]  # another wherever it is cut
    return [f"Again, {each}" if isinstance(each, str) else _another(each) for each in prompt]


def _completions() -> Iterator[Call]:
    said: dict[str, dict[str, Any]] = {
        "greedy": GREEDY,
        "to its end": {"temperature": 0, "max_tokens": 30},
        "seeded": SAMPLED,
        "seeded, top_p": SAMPLED | {"top_p": 0.7},
        "seeded, top_k": SAMPLED | {"top_k": 9},
        "seeded, min_p": SAMPLED | {"min_p": 0.2},
        "logprobs": GREEDY | {"logprobs": 3},
        "seeded, logprobs": SAMPLED | {"logprobs": 0},
        "stop string": GREEDY | {"stop": ["a", "e"], "max_tokens": 60},
        "stop string that stays": GREEDY | {"stop": ["a", "e"], "max_tokens": 60, "include_stop_str_in_output": True},
        "stop token": GREEDY | {"stop_token_ids": list(range(300, 400)), "max_tokens": 60},
        "min_tokens": {"temperature": 0, "max_tokens": 20, "min_tokens": 9, "stop": ["a", "e", "i"]},
        "logit_bias": GREEDY | {"logit_bias": {"300": 30, "301": 29}},
        "frequency_penalty": GREEDY | {"frequency_penalty": 1.5},
        "presence_penalty": GREEDY | {"presence_penalty": 1.5},
        "repetition_penalty": GREEDY | {"repetition_penalty": 1.4},
        "bad_words": GREEDY | {"bad_words": ["a", "e", "o"]},
        "allowed_token_ids": GREEDY | {"allowed_token_ids": [40, 41, 42, 300, 301]},
        "truncated": GREEDY | {"truncate_prompt_tokens": 131},
        "salted": GREEDY | {"cache_salt": "mine"},
        "special tokens": GREEDY | {"skip_special_tokens": False, "logit_bias": {"2": 100}},
        "token ids": GREEDY | {"return_token_ids": True},
        "tokens by id": GREEDY | {"logprobs": 1, "return_tokens_as_token_ids": True},
        "echo": GREEDY | {"echo": True},
        "user and priority": GREEDY | {"user": "somebody", "priority": 0},
        "regex": FINITE | {"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}},
        "choice": FINITE | {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
        "grammar": FINITE | {"structured_outputs": {"grammar": 'root ::= "x" [0-9] [0-9] "y"'}},
        "json": FINITE | {"structured_outputs": {"json": VERDICT}},
        "response_format": FINITE | {"response_format": _schema()},
    }
    for number, (name, options) in enumerate(said.items()):
        yield Call(f"completion: {name}", COMPLETIONS, {"prompt": prompt_of(LENGTH + number, 900 + number)} | options)
    # Several chunks: of this one vLLM's CPU build died.
    yield Call("completion: long, seeded", COMPLETIONS, {"prompt": prompt_of(800, 881)} | SAMPLED)
    prompt = prompt_of(LENGTH, 880)
    # Computed whole where it is decoded: vLLM computes log probabilities of a prompt whatever is cached.
    yield Call(
        "completion: echo, logprobs", COMPLETIONS, {"prompt": prompt, "echo": True, "logprobs": 1} | GREEDY, False
    )


def _chats() -> Iterator[Call]:
    said: dict[str, dict[str, Any]] = {
        "greedy": GREEDY,
        "seeded": SAMPLED,
        "logprobs": GREEDY | {"logprobs": True, "top_logprobs": 4},
        "logprobs without others": GREEDY | {"logprobs": True},
        "stop": GREEDY | {"stop": "o", "max_tokens": 60},
        "max_completion_tokens": {"temperature": 0, "max_completion_tokens": 5, "ignore_eos": True},
        "tools, none": GREEDY | {"tools": [WEATHER, CLOCK], "tool_choice": "none"},
        "tools, auto": GREEDY | {"tools": [WEATHER, CLOCK], "tool_choice": "auto"},
        "tools, named": FINITE | {"tools": [WEATHER, CLOCK], "tool_choice": _named("weather")},
        "tools, required": FINITE | {"tools": [WEATHER, CLOCK], "tool_choice": "required"},
        "tools, named, seeded": FINITE | SAMPLED | {"max_tokens": 80, "tools": [CLOCK], "tool_choice": _named("clock")},
        "json_object": FINITE | {"response_format": {"type": "json_object"}},
        "json_schema": FINITE | {"response_format": _schema()},
        "regex": FINITE | {"structured_outputs": {"regex": "(north|south){2}"}},
        "choice": FINITE | {"structured_outputs": {"choice": ["east", "west"]}},
        "penalties": GREEDY | {"frequency_penalty": 0.9, "presence_penalty": 0.4},
        "logit_bias": GREEDY | {"logit_bias": {"310": 25}},
        "token ids": GREEDY | {"return_token_ids": True},
        "no generation prompt": GREEDY | {"add_generation_prompt": False},
    }
    for number, (name, options) in enumerate(said.items()):
        said_before = [{"role": "system", "content": f"{number} things: " + "be brief. " * 12}]
        messages = [*said_before, {"role": "user", "content": f"Tell me of {name}."}]
        yield Call(f"chat: {name}", CHAT, {"messages": messages} | options)
    messages = [{"role": "user", "content": "What is in the prompt? " * 8}]
    yield Call("chat: prompt_logprobs", CHAT, {"messages": messages, "prompt_logprobs": 1} | GREEDY, False)


def _several() -> Iterator[Call]:
    """Several answers of one request: each crosses by itself."""
    prompts = [prompt_of(LENGTH + number, 700 + number) for number in range(9)]
    texts = [f"{word} upon a time, " * 9 for word in ("once", "twice")]
    messages = [{"role": "user", "content": "Two of you, please. " * 8}]
    said: list[tuple[str, int, dict[str, Any]]] = [
        ("prompts", 3, {"prompt": prompts[:3]} | GREEDY),
        ("texts, echo", 2, {"prompt": texts, "echo": True} | GREEDY),
        ("n", 3, {"prompt": prompts[3], "n": 3} | SAMPLED),
        ("prompts, n", 4, {"prompt": prompts[4:6], "n": 2} | SAMPLED),
        ("n, echo", 2, {"prompt": prompts[6], "n": 2, "echo": True} | SAMPLED),
        ("best_of", 2, {"prompt": prompts[7], "n": 2, "best_of": 2} | SAMPLED),
        ("n, logprobs", 2, {"prompt": prompts[8], "n": 2, "logprobs": 2} | SAMPLED),
        ("n of a chat", 2, {"messages": messages, "n": 2} | SAMPLED),
    ]
    for name, answers, body in said:
        endpoint = CHAT if "messages" in body else COMPLETIONS
        yield Call(f"several: {name}", endpoint, body, answers=answers)


def _schema() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# The answer's id, time and server: no part of what is said.
APART: Final = frozenset(
    {"id", "created", "model", "system_fingerprint", "kv_transfer_params", "prompt_tokens_details", "object"}
)


def told_in(body: bytes, *, streamed: bool) -> Any:
    """What an answer says: of a stream, all of its events together."""
    if not streamed:
        return _plain(json.loads(body))
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.get("choices", []):
            _add(choices.setdefault(choice["index"], {}), choice)
    usage = [event["usage"] for event in events if event.get("usage")][-1]
    prompts = [event["prompt_token_ids"] for event in events if event.get("prompt_token_ids")]
    return _plain(
        {"choices": [choices[index] for index in sorted(choices)], "usage": usage, "prompt_token_ids": prompts}
    )


def _add(known: dict[str, Any], more: dict[str, Any]) -> None:
    """Texts and lists of a stream go on, everything else is said once."""
    for name, value in more.items():
        before = known.get(name)
        if name == "tool_calls" and value:
            known[name] = _with_calls(before or [], value)  # an event may have two parts of one call
        elif isinstance(value, dict):
            known[name] = before or {}
            _add(known[name], value)
        elif name in ("index", "role", "type", "id", "finish_reason", "stop_reason") or before is None:
            known[name] = value if value is not None else before
        elif value is not None:
            known[name] = before + value


def _with_calls(known: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for call in more:
        same = next((each for each in known if each["index"] == call["index"]), None)
        if same is None:
            known.append(call)
        else:
            _add(same, call)
    return known


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _plain(each) for name, each in value.items() if name not in APART and each is not None and each != []
        }
    return [_plain(each) for each in value] if isinstance(value, list) else value


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """Where two answers differ first; "" where they do not. Numbers that are no whole ones may, by a little."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in ours.keys() | theirs.keys():
            if found := difference(ours.get(name), theirs.get(name), f"{where}.{name}"):
                return found
        return ""
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((found for i, pair in pairs if (found := difference(*pair, f"{where}[{i}]"))), "")
    if isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, abs_tol=LOGPROB_TOLERANCE):
        return ""
    return "" if ours == theirs else f"{where}: {ours!r} is not {theirs!r}"
