"""Rendering must be that of `apply_chat_template`, to the byte."""

from datetime import datetime
from typing import Any

import pytest

from prompts.chat.template import ChatTemplate
from prompts.errors import TemplateError

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  be <b>brief</b> & 'kind'  "},
    {"role": "user", "content": "hi\n\n  there"},
    {
        "role": "assistant",
        "content": 'é漢 "quoted"',
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
    },
    {"role": "user", "content": "and now?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<d>", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "plain": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
    "blocks": """
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
{% endif %}
{% for m in messages %}
    {% if m.role == 'system' %}
{{ bos_token }}[{{ m.content | trim }}]
    {% elif m.role == 'assistant' %}
        {% generation %}
{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson(indent=2) }}{% endfor %}
        {% endgeneration %}
    {% else %}
        {% if loop.index > 9 %}{% break %}{% endif %}
{{ m.content }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}>{{ thinking | default('') }}{% endif %}
""",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content[:2] }}"
    "{% endfor %}{{ messages | length }}{{ messages[0] | tojson }}",
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": TOOLS},
    {"add_generation_prompt": False, "continue_final_message": True},
]


def rendered(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, SPECIAL, datetime.now).render(messages, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str, options: dict[str, Any]) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    if name == "namespace" and "continue_final_message" in options:
        pytest.skip("this template cuts its messages, so neither side can continue one")
    expected = reference.render_jinja_template(
        conversations=[CHAT], chat_template=TEMPLATES[name], thinking="hm", **SPECIAL, **options
    )[0][0]
    assert rendered(TEMPLATES[name], CHAT, kwargs={"thinking": "hm"}, **options) == expected


def test_the_clock_is_the_callers() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, lambda: datetime(2026, 1, 2))
    assert template.render(CHAT) == "2026-01-02"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "no attribute"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_a_refusal_and_a_broken_template_are_the_same_error(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        rendered(source, CHAT)


def test_messages_are_data_and_never_template() -> None:
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


def test_what_cannot_be_continued_is_said() -> None:
    with pytest.raises(TemplateError, match="does not render the final message"):
        rendered("x", CHAT, continue_final_message=True)
