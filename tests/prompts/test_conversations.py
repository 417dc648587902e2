"""A chat that goes on has the tokens that reading all of it gives; what of it was known is not read again."""

import json
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompts.chat.template import ChatTemplate
from prompts.conversations import CHECKED_FIRST, Conversations
from prompts.errors import TakesLonger
from prompts.fair_cache import FairCache
from prompts.reading import Chat, chat_tokens
from prompts.tokens.tokenizer import TextTokenizer
from tests.prompts.builders import bpe, chat_template
from tests.properties import examples

pytestmark = pytest.mark.long

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}{% endfor %}"
)
COUNTED = (
    "{% for message in messages %}{% set text = message['content'] | trim %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{% if loop.index0 == 1 %}second {% elif loop.index > 3 %}later {% endif %}"
    "{% for word in text.split(' ')[:loop.index] %}{{ word }}{% if not loop.last %},{% endif %}{% endfor %}<|im_end|>"
    "{{ text }}{% if message.role == 'user' and messages[0].role == 'system' %}<|im_start|>{% endif %}"
    "{% endfor %}{{ extra }}"
)
APPENDING = (TURNS, DEFAULT_SYSTEM, COUNTED)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(["<|im_end|>", "<|im_st", "art|>", " hello", "quick brown ", "é漢", "\n", "<s>"])).map(
        "".join
    ),
    st.lists(st.text(max_size=8), max_size=3).map(lambda parts: [{"type": "text", "text": part} for part in parts]),
    st.none(),
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), min_size=1, max_size=4)
STYLES = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


def tokenizer_for(template: str, kind: type[TextTokenizer] = TextTokenizer) -> TextTokenizer:
    return kind(bpe(), chat_template(template), cache=FairCache(1 << 20))


def chat_of(messages: list[dict[str, Any]], **fields: Any) -> tuple[Chat, dict[str, bytes]]:
    return Chat(messages=messages, **fields), {name: json.dumps(value).encode() for name, value in fields.items()}


class Reader:
    """Reads chats both ways."""

    def __init__(self, template: str, stride_bytes: int = 64, kind: type[TextTokenizer] = TextTokenizer) -> None:
        self.tokenizer = tokenizer_for(template, kind)
        self.conversations = Conversations(self.tokenizer, stride_bytes)

    def read(
        self,
        messages: list[dict[str, Any]],
        separators: tuple[str, str] = (",", ":"),
        tenant: bytes = b"",
        **fields: Any,
    ) -> str:
        chat, said = chat_of(messages, **fields)
        written = json.dumps(messages, separators=separators, ensure_ascii=False)
        try:
            raw = written.encode()
        except UnicodeEncodeError:
            raw = json.dumps(messages, separators=separators).encode()
        read = self.conversations.tokens(raw, said, chat, tenant)
        if read.tokens is not None:
            assert (
                read.tokens.tolist() == chat_tokens(chat, tokenizer_for(self.tokenizer.blueprint().template)).tolist()
            )
        return read.how


@pytest.mark.parametrize("template", APPENDING)
@settings(deadline=None, max_examples=examples(60))
@given(turns=st.lists(st.tuples(MESSAGES, st.integers(0, 3), STYLES), min_size=1, max_size=6), tools=st.booleans())
def test_whatever_is_said_next_the_tokens_are_those_of_the_whole(
    template: str, turns: list[tuple[list[dict[str, Any]], int, tuple[str, str]]], tools: bool
) -> None:
    reader, said = Reader(template), list[dict[str, Any]]()
    fields: dict[str, Any] = {"tools": [{"name": "look"}]} if tools else {}
    for new, taken_back, separators in turns:
        said = said[: len(said) - taken_back] + new  # an edit, or another branch
        assert reader.read(said, separators, **fields) in ("new", "continued", "short", "refused")


def conversation(turns: int) -> list[dict[str, Any]]:
    return [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i} " + "over the dog " * 9}
        for i in range(turns)
    ]


def test_a_conversation_that_goes_on_is_continued() -> None:
    reader = Reader(TURNS)
    hows = [reader.read(conversation(turns)) for turns in range(2, 12)]
    assert hows == ["new"] + ["continued"] * 9
    assert reader.read(conversation(11)) == "continued"  # and again


def test_only_what_is_new_is_tokenised() -> None:
    reader = Reader(TURNS)
    for turns in range(2, 12):
        reader.read(conversation(turns))
    before = reader.tokenizer.cache.misses + reader.tokenizer.cache.hits
    reader.read(conversation(13))
    asked = reader.tokenizer.cache.misses + reader.tokenizer.cache.hits - before
    reader.read(conversation(213))
    reader.read(conversation(215))
    before = reader.tokenizer.cache.misses + reader.tokenizer.cache.hits
    reader.read(conversation(217))
    # Beside looking for the conversation, by strides, what is asked for does not grow with it.
    strides = len(json.dumps(conversation(217), separators=(",", ":"))) // 64
    assert reader.tokenizer.cache.misses + reader.tokenizer.cache.hits - before - strides < asked + 8


def test_other_tools_or_variables_are_another_conversation() -> None:
    reader = Reader(COUNTED)
    assert reader.read(conversation(4)) == "new"
    assert reader.read(conversation(6), chat_template_kwargs={"extra": "x"}) == "new"
    assert reader.read(conversation(6), add_generation_prompt=False) == "new"
    assert reader.read(conversation(6)) == "continued"


def test_more_than_was_allowed_is_not_read() -> None:
    reader = Reader(TURNS)

    def size(turns: int) -> int:
        return len(json.dumps(conversation(turns), separators=(",", ":")))

    def read(turns: int, most_new: int | None) -> str:
        messages = json.dumps(conversation(turns), separators=(",", ":")).encode()
        return reader.conversations.tokens(messages, {}, chat_of(conversation(turns))[0], most_new=most_new).how

    with pytest.raises(TakesLonger):  # it is new
        read(4, 1000)
    read(4, None)
    with pytest.raises(TakesLonger):  # it is one of those that are compared with the whole
        read(5, 1000)
    for _ in range(CHECKED_FIRST):
        assert read(5, None) == "continued"
    assert read(5, 0) == "continued"  # the same
    with pytest.raises(TakesLonger):
        read(7, size(7) - size(5) - 1)
    assert read(7, size(7) - size(5) + 10) == "continued"


def test_tenants_share_nothing() -> None:
    reader = Reader(TURNS)
    assert reader.read(conversation(4), tenant=b"a") == "new"
    assert reader.read(conversation(5), tenant=b"b") == "new"
    assert reader.read(conversation(6), tenant=b"a") == "continued"


def test_what_cannot_be_continued_is_told_by_reason() -> None:
    reader = Reader(TURNS, stride_bytes=1000)
    assert reader.read(conversation(1)) == "short"
    assert reader.read(conversation(20), continue_final_message=True) == "unusual"
    assert reader.read([*conversation(20), {"role": 3}]) == "refused"  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages }}", "no_single_loop"),
        ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}", "no_single_loop"),
        ("{% for m in messages %}a{% endfor %}{% for m in messages %}b{% endfor %}", "no_single_loop"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "loop_of_another_kind"),
        ("{% for m in messages %}{{ messages[-1].role }}{% endfor %}", "other_messages"),
        ("{% for m in messages %}{{ messages | length }}{% endfor %}", "other_messages"),
        ("{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}", "looks_ahead"),
        ("{% for m in messages %}{{ loop.nextitem }}{% endfor %}", "looks_ahead"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
            "state",
        ),
        ("{{ strftime_now('%H') }}{% for m in messages %}{{ m.content }}{% endfor %}", "time_or_state"),
        ("{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "state"),
        ("{% for m in messages %}{{ ['a', 'b'] | random }}{% endfor %}", "chance"),
        ("{% macro say(m) %}{{ loop.index0 }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}", "state"),
    ],
)
def test_templates_that_look_around_are_not_continued(template: str, reason: str) -> None:
    reader = Reader(template)
    assert reader.tokenizer.not_appending(False) == reason
    assert reader.read(conversation(4)) == f"template_{reason}"


@pytest.mark.parametrize("template", APPENDING)
def test_templates_that_only_append_are_recognised(template: str) -> None:
    assert tokenizer_for(template).not_appending(False) == ""


def test_a_loop_over_nothing_counts_messages_from_the_first_one_on() -> None:
    of_nothing = "{% for part in m.parts %}{% else %}{{ loop.index }}{% if loop.first %}!{% endif %}{% endfor %}"
    template = ChatTemplate(f"{{% for m in messages %}}{of_nothing}{{% endfor %}}", {}, datetime.now)
    first, *others = messages = conversation(2)
    options: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True, "kwargs": None}
    assert template.not_appending == ""
    assert template.render(messages) == "1!" + "".join(str(number) for number in range(2, len(messages) + 1))
    parts = [template.render_from(start, first, new, **options) for start, new in ((0, [first]), (1, others))]
    assert "".join(part.messages for part in parts if part is not None) == template.render(messages)


class ForgetfulTokenizer(TextTokenizer):
    """Of messages that are appended it does not see what they say."""

    def render_from(self, start: int, first: Any, new: Any, **options: Any) -> Any:
        seen = [{**message, "content": "?"} for message in new] if start else new
        return super().render_from(start, first, seen, **options)


def test_a_template_that_differs_after_all_is_not_believed_again() -> None:
    reader = Reader(TURNS, kind=ForgetfulTokenizer)
    assert reader.read(conversation(3)) == "new"
    assert [reader.read(conversation(4)), reader.read(conversation(5))] == ["template_differs"] * 2
