"""Chats as clients write them, and vLLM's own reading of them, without a server."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.prompts.builders import bpe

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
MAX_MODEL_LEN = 100_000

USER = {"role": "user", "content": "What is the weather in Zürich?"}
SYSTEM = {"role": "system", "content": "Be brief.  "}
DEVELOPER = {"role": "developer", "content": "Use tools."}
ANSWER = {"role": "assistant", "content": " It rains. "}
LAST = {"role": "user", "content": "And tomorrow?\n"}


def text(*parts: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} | more for part in parts]


def call(arguments: Any, number: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "id": f"call{number:05}",
        "type": "function",
        "function": {"name": "look_up", "arguments": arguments},
    } | more


def called(*calls: dict[str, Any], content: Any = None, **more: Any) -> list[dict[str, Any]]:
    """A turn with calls of tools, and what came of them."""
    results = [{"role": "tool", "tool_call_id": each["id"], "content": '{"sky": "grey"}'} for each in calls]
    return [USER, {"role": "assistant", "content": content, "tool_calls": list(calls)} | more, *results]


COMPACT = '{"place":"Zürich","days":[1,2.0,1e3],"deep":{"b":null,"a":true}}'
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, LAST],
    "other order of keys": [{"content": "Be brief.", "role": "system"}, {"content": "Hi", "role": "user"}],
    "more keys": [USER | {"name": "ann", "id": "x1"}, ANSWER | {"refusal": None, "annotations": []}, LAST],
    "parts": [{"role": "user", "content": text("one", "two\n", "three")}],
    "one part": [{"role": "system", "content": text("Be brief.")}, {"role": "user", "content": text("Hi")}],
    "parts everywhere": [
        {"role": "system", "content": text("a", "b")},
        {"role": "user", "content": text("c", "d")},
        {"role": "assistant", "content": text("e", "f")},
        LAST,
    ],
    "cached parts": [{"role": "user", "content": text("one", "two", cache_control={"type": "ephemeral"})}, ANSWER, LAST],
    "plain strings as parts": [{"role": "user", "content": ["one", "two"]}],
    "other types of text": [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        LAST,
    ],
    "empty": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    "empty parts": [{"role": "user", "content": text("", "one", "", "two", "")}],
    "parts that are null": [
        {"role": "user", "content": [{"type": "text", "text": None}, {"type": "input_text", "text": None}, *text("a")]}
    ],
    "null": [USER, {"role": "assistant", "content": None}, LAST],
    "no parts": [{"role": "user", "content": []}],
    "billing header": [
        {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nBe brief."},
        USER,
    ],
    "billing header as a part": [
        {"role": "system", "content": text("x-anthropic-billing-header: cch=1;", "Be brief.")},
        USER,
    ],
    "developer": [DEVELOPER, USER, ANSWER, LAST],
    "developer in parts": [{"role": "developer", "content": text("a", "b")}, USER],
    "developer behind system": [SYSTEM, DEVELOPER, USER],
    "developer later": [USER, ANSWER, DEVELOPER, LAST],
    "developer before system": [DEVELOPER, SYSTEM, USER, ANSWER, LAST],
    "developer with tools": [
        DEVELOPER | {"tools": [{"type": "function", "function": {"parameters": {"type": "object"}, "name": "look_up"}}]},
        USER,
    ],
    "a role of its own": [{"role": "critic", "content": "Hm."}, USER],
    "system later": [USER, ANSWER, SYSTEM, LAST],
    "compact arguments": [*called(call(COMPACT)), ANSWER, LAST],
    "spaced arguments": called(call(json.dumps(json.loads(COMPACT), indent=2))),
    "escaped arguments": called(call('{"place":"Z\\u00fcrich","quote":"\\"\\n</tool>"}')),
    "no arguments": called(call("")),
    "empty arguments": called(call("{}")),
    "broken arguments": called(call('{"place": "Z')),
    "arguments that are no object": called(call("[1, 2]")),
    "repeated arguments": called(call('{"a": 1, "a": 2, "b": NaN}')),
    "several calls": called(call(COMPACT), call('{"b":1,"a":2}', 2), content="Let me see."),
    "calls with an index": called(call('{"a":1}', index=0)),
    "calls, keys in another order": called(
        {"function": {"arguments": '{"a":1}', "name": "look_up"}, "type": "function", "id": "call00001"}
    ),
    "no calls": [USER, ANSWER | {"tool_calls": []}, LAST],
    "null calls": [USER, ANSWER | {"tool_calls": None}, LAST],
    "results in parts": [
        *called(call('{"a":1}'))[:2],
        {"role": "tool", "tool_call_id": "call00001", "content": text("one", "two"), "name": "look_up"},
    ],
    "a result without content": [*called(call('{"a":1}'))[:2], {"role": "tool", "tool_call_id": "call00001", "content": ""}],
    "reasoning": [USER, ANSWER | {"reasoning": "It must rain."}, LAST],
    "reasoning_content": [USER, ANSWER | {"reasoning_content": "It must rain."}, LAST],
    "both reasonings": [USER, ANSWER | {"reasoning": "A", "reasoning_content": "B"}, LAST],
    "null reasoning": [USER, ANSWER | {"reasoning": None, "reasoning_content": "B"}, LAST],
    "reasoning and calls": [*called(call('{"a":1}'), reasoning="Look it up."), ANSWER, LAST],
    "thoughts in parts": [
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, *text("It rains.")]},
        LAST,
    ],
    "thoughts in the text": [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt rains."}, LAST],
    "ends with an answer": [USER, ANSWER],
}  # fmt: skip

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer", "minimum": 0}}}
BARE = {"type": "function", "function": {"name": "look_up"}}
DESCRIBED = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks <it> up.", "parameters": PARAMETERS},
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "described": [DESCRIBED],
    "bare": [BARE],
    "no description": [{"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}],
    "no parameters": [{"type": "function", "function": {"name": "look_up", "description": "d"}}],
    "another order": [
        {"function": {"parameters": PARAMETERS, "description": "Looks it up.", "name": "look_up"}, "type": "function"}
    ],
    "strict": [{"type": "function", "function": {"strict": True, "name": "look_up", "parameters": PARAMETERS}}],
    "not strict": [{"type": "function", "function": {"strict": None, "name": "look_up", "parameters": PARAMETERS}}],
    "more keys": [{**DESCRIBED, "cache_control": {"type": "ephemeral"}, "function": {**DESCRIBED["function"], "x": 1}}],
    "deferred": [{**DESCRIBED, "defer_loading": True}],
    "no type": [{"function": {"name": "look_up", "parameters": PARAMETERS}}],
    "several": [
        DESCRIBED,
        BARE,
        {"type": "function", "function": {"name": "ask", "description": "Ü", "parameters": {}}},
    ],
}
FIELDS: dict[str, dict[str, Any]] = {
    "no generation prompt": {"add_generation_prompt": False},
    "special tokens": {"add_special_tokens": True},
    "no thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "thinking": {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    "variables that say nothing": {"chat_template_kwargs": {"enable_thinking": None, "reasoning_effort": "auto"}},
    "variables of nobody's": {"chat_template_kwargs": {"range": 3, "nobody": 1, "bos_token": "<s>"}},
    "effort": {"reasoning_effort": "low"},
    "no effort": {"reasoning_effort": "none"},
    "effort and thinking": {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    "documents": {"documents": [{"title": "Rain", "text": "It falls."}, {"text": "Down."}]},
    "cut": {"truncate_prompt_tokens": 9},
    "cut, with special tokens": {"truncate_prompt_tokens": 9, "add_special_tokens": True},
    "cut on the right": {"truncate_prompt_tokens": 9, "truncation_side": "right"},
    "cut on the left": {"truncate_prompt_tokens": 9, "truncation_side": "left", "add_special_tokens": True},
    "cut nowhere": {"truncate_prompt_tokens": -1},
    "null": {"tools": None, "documents": None, "chat_template_kwargs": None, "reasoning_effort": None},
}
OPEN = {"add_generation_prompt": False, "continue_final_message": True}


def bodies() -> dict[str, dict[str, Any]]:
    """The fields of all chats, by what is special about them."""
    found: dict[str, dict[str, Any]] = {name: {"messages": messages} for name, messages in HISTORIES.items()}
    found |= {f"tools: {name}": {"messages": [SYSTEM, USER], "tools": tools} for name, tools in TOOLS.items()}
    for name in ("compact arguments", "developer", "parts", "reasoning and calls", "developer later"):
        found[f"{name}, and tools"] = {"messages": HISTORIES[name], "tools": TOOLS["another order"]}
    found |= {f"field: {name}": {"messages": HISTORIES["several turns"]} | fields for name, fields in FIELDS.items()}
    for name in ("ends with an answer", "parts everywhere", "null", "compact arguments"):
        kept = HISTORIES[name][: 3 if name == "parts everywhere" else 2]
        found[f"goes on: {name}"] = {"messages": kept} | OPEN
    return found


def save_model(directory: Path, template: Path) -> Path:
    """A directory with a small tokenizer that has `template`."""
    directory.mkdir()
    tokenizer = bpe()
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "chat_template.jinja").write_text(template.read_text())
    return directory


class VllmReader:
    """vLLM's reading of chats for the tokenizer in a directory: the classes of its API server, and no engine."""

    def __init__(self, directory: Path) -> None:
        from vllm.renderers.hf import HfRenderer
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.tokenizers import get_tokenizer

        name = str(directory)
        model: Any = SimpleNamespace(
            max_model_len=MAX_MODEL_LEN, hf_config=SimpleNamespace(model_type="llama"), model=name, tokenizer=name,
            revision=None, tokenizer_revision=None, code_revision=None, trust_remote_code=False, renderer_num_workers=1,
            enable_prompt_embeds=False, multimodal_config=None, supports_multimodal_inputs=False, is_multimodal_model=False,
            is_encoder_decoder=False, get_multimodal_config=lambda: None,
        )  # fmt: skip
        config: Any = SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(_api_process_rank=0, _api_process_count=1),
            observability_config=SimpleNamespace(enable_mm_processor_stats=False),
        )
        self._renderer: Any = HfRenderer(config, get_tokenizer(name))
        self._online = OnlineRenderer(
            model, self._renderer, request_logger=None, chat_template=None, chat_template_content_format="auto",
            enable_auto_tools=True,
        )  # fmt: skip

    def tokens(self, fields: dict[str, Any]) -> list[int] | None:
        """The tokens of a chat, None where vLLM refuses it."""
        from pydantic import ValidationError
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.exceptions import VLLMValidationError

        body = json.loads(json.dumps({"model": "m"} | fields))
        try:
            asked = ChatCompletionRequest.model_validate(body)
            answer = asyncio.run(self._online.render_chat(asked))
        except (ValidationError, VLLMValidationError):
            return None
        if not isinstance(answer, tuple):
            return None
        tokens: list[int] = answer[1][0]["prompt_token_ids"]
        return tokens

    def close(self) -> None:
        """Ends its threads."""
        self._renderer.shutdown()
