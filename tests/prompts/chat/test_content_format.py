"""Which templates want parts. Beside vLLM's own rule it is tested over real templates, in tests/vllm/test_chats.py."""

import pytest
from jinja2 import Environment

from prompts.chat.content_format import wants_parts

MACRO = "{% macro say(c) %}{% for p in c %}{% endfor %}{% endmacro %}{% for m in messages %}{{ say(m.content) }}{% endfor %}"
LOOP = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        (LOOP, True),
        (LOOP.replace("m.content", "m['content'] | list"), True),
        (LOOP.replace("m.content", "m.content[1:]"), True),
        (LOOP.replace("m.content", "m.tool_calls"), False),
        (LOOP.replace("in messages", "in messages[1:]"), True),
        ("{% set rest = messages[1:] %}" + LOOP.replace("in messages", "in rest"), True),
        ("{% set messages = messages %}" + LOOP, True),
        ("{% for m in others %}{% for p in m.content %}{% endfor %}{% endfor %}", False),
        ("{% set content = 1 %}{% for p in content %}{% endfor %}", True),
        (MACRO, True),
        (MACRO.replace("say(m.content)", "say(c=m.content)"), True),
        (MACRO.replace("say(m.content)", "say(m.text)"), False),
        (MACRO.replace("(c)", "(content)").replace("in c ", "in content ").replace("m.content", "m.text"), False),
        ("{% for a, b in messages %}{% endfor %}", False),
        ("{% set a = messages %}{% set messages = a %}{{ a }}", False),
    ],
)  # fmt: skip
def test_who_runs_over_content_wants_parts(template: str, expected: bool) -> None:
    assert wants_parts(Environment().parse(template)) is expected
