"""Chats of every kind that a client could write, drawn at random: cases that the written ones leave out."""

import json
from random import Random
from typing import Any

TEXTS = ("hi", " a\n", "", "é漢", "😀", "<|im_end|>", "</think>", '{"a":1}', "x-anthropic-billing-header: 1\nrest")
VALUES: tuple[Any, ...] = (
    None, 1, 2.5, True, "auto", "x", [], {}, [1, {"b": 1, "a": None}], {"z": 1, "a": [2]}, 1e22, -0.0, 12345678901234567890,
)  # fmt: skip
ARGUMENTS = ("", "[]", "null", '{"a', "42", '{"a":1,"a":2}', '{"a": 1e400}', ' {"a":1} ')
ROLES = ("user",) * 4 + ("assistant",) * 4 + ("tool",) * 2 + ("system", "system", "developer", "critic")
MORE_KEYS = ("id", "x", "task", "weight", "prefix", "status", "tools", "recipient")
VARIABLES = ("enable_thinking", "thinking", "reasoning_effort", "x", "namespace", "dict", "strftime_now", "pad_token")
PARAMETERS: tuple[Any, ...] = (
    None,
    {},
    {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": ["integer", "null"]}}, "required": ["b"]},
)
EFFORTS = ("none", "minimal", "low", "high", "max", None)


class Writer:
    """Writes chats; equal seeds write equal ones."""

    def __init__(self, seed: str) -> None:
        self._chance = Random(seed)

    def body(self) -> dict[str, Any]:
        """The fields of a chat."""
        found: dict[str, Any] = {"messages": [self._message() for _ in range(self._chance.randrange(1, 6))]}
        if self._happens(0.4):
            found["tools"] = [self._tool() for _ in range(self._chance.randrange(1, 3))]
        options: list[tuple[float, dict[str, Any]]] = [
            (0.2, {"reasoning_effort": self._one_of(EFFORTS)}),
            (0.2, {"chat_template_kwargs": {self._one_of(VARIABLES): self._one_of(VALUES) for _ in range(2)}}),
            (0.1, {"add_generation_prompt": self._one_of((True, False, None))}),
            (0.1, {"continue_final_message": True, "add_generation_prompt": False}),
            (0.05, {"add_special_tokens": True}),
            (0.1, {"truncate_prompt_tokens": self._one_of((1, 2, 3, 7, 50, -1))}),
            (0.05, {"truncation_side": self._one_of(("left", "right"))}),
            (0.1, {"documents": self._one_of(([], [{"text": "a", "title": "t"}]))}),
            (0.05, {"tool_choice": "none"}),
            (0.05, {"max_tokens": 5}),
        ]
        for share, fields in options:
            if self._happens(share):
                found |= fields
        return found

    def _happens(self, share: float) -> bool:
        return self._chance.random() < share

    def _one_of(self, values: Any) -> Any:
        return self._chance.choice(values)

    def _text(self) -> str:
        text: str = self._one_of(TEXTS)
        return text

    def _mixed(self, fields: dict[str, Any], share: float = 0.4) -> dict[str, Any]:
        """The same, perhaps in another order."""
        if not self._happens(share):
            return fields
        names = list(fields)
        self._chance.shuffle(names)
        return {name: fields[name] for name in names}

    def _message(self) -> dict[str, Any]:
        role = self._one_of(ROLES)
        made: dict[str, Any] = {"role": role, "content": self._content()}
        if self._happens(0.1):
            made["name"] = self._one_of(("ann", None, ""))
        if role == "assistant":
            made |= self._said_by_an_assistant()
        if role == "tool":
            made["tool_call_id"] = "call00000"
        if role == "developer" and self._happens(0.4):
            made["tools"] = [self._tool()]
        if self._happens(0.1):
            made[self._one_of(MORE_KEYS)] = self._one_of(VALUES)
        return self._mixed(made, 0.3)

    def _said_by_an_assistant(self) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if self._happens(0.5):
            calls = [self._call(number) for number in range(self._chance.randrange(1, 3))]
            made["tool_calls"] = self._one_of((None, [])) if self._happens(0.15) else calls
        for name in ("reasoning", "reasoning_content"):
            if self._happens(0.25):
                made[name] = self._one_of((None, "", "Hm."))
        return made

    def _content(self) -> Any:
        kind = self._chance.random()
        if kind < 0.5:
            return self._text()
        return None if kind < 0.6 else [self._part() for _ in range(self._chance.randrange(4))]

    def _part(self) -> Any:
        if self._happens(0.08):
            return self._text()
        kind = self._one_of(("text",) * 6 + ("input_text", "output_text", "refusal", "thinking", "tool_reference"))
        said: Any = self._text()
        if kind == "text" and self._happens(0.05):
            said = None
        key = {"refusal": "refusal", "thinking": "thinking", "tool_reference": "name"}.get(kind, "text")
        made = {"type": kind, key: "look_up" if key == "name" else said}
        extras: list[tuple[float, dict[str, Any]]] = [
            (0.15, {"cache_control": {"type": "ephemeral"}}),
            (0.1, {"annotations": []}),
            (0.05, {"closed": True}),
        ]
        for share, more in extras:
            if self._happens(share):
                made |= more
        return self._mixed(made)

    def _call(self, number: int) -> dict[str, Any]:
        value = {"a": self._one_of(VALUES), "b": self._text(), "deep": {"y": self._one_of(VALUES)}}
        separators = self._one_of(((",", ":"), (", ", ": ")))
        written = json.dumps(value, separators=separators, ensure_ascii=self._happens(0.5))
        arguments = self._one_of(ARGUMENTS) if self._happens(0.3) else written
        function = {"name": "look_up", "arguments": arguments}
        if self._happens(0.1):
            function["x"] = self._one_of(VALUES)
        made = {"id": f"call{number:05}", "type": "function", "function": self._mixed(function)}
        return self._mixed(made | ({"index": number} if self._happens(0.2) else {}))

    def _tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self._one_of(("look_up", "ask"))}
        options: list[tuple[float, dict[str, Any]]] = [
            (0.6, {"description": self._one_of((None, "d <x>", "é"))}),
            (0.7, {"parameters": self._one_of(PARAMETERS)}),
            (0.2, {"strict": self._one_of((True, False, None))}),
            (0.1, {"x": self._one_of(VALUES)}),
            (0.1, {"defer_loading": self._one_of((True, False, None))}),
        ]
        for share, fields in options:
            if self._happens(share):
                function |= fields
        made = {"type": "function", "function": self._mixed(function)}
        for name in ("cache_control", "defer_loading"):
            if self._happens(0.1):
                made[name] = self._one_of((True, False, None))
        return self._mixed(made)
