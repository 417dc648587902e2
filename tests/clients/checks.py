"""What other projects' clients get from a gateway: `make test-clients`. A script for their environment, not for ours.

GATEWAY and TOOL_GATEWAY say where gateways answer (`tests.clients.behind`).
"""

import asyncio
import json
import os
import subprocess
import sys
import traceback
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # nothing is fetched from anywhere

import anthropic
import litellm
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ValidationError

URL, TOOL_URL = os.environ["GATEWAY"], os.environ["TOOL_GATEWAY"]
TEXT = "the quick brown fox jumps over the lazy dog " * 20
EXAMPLE_S = 600
MESSAGES = [{"role": "user", "content": TEXT}]
SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}


class Look(BaseModel):
    at: int


def _openai(url: str, **options: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, **options)


def _anthropic(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)


MODEL = _openai(URL).models.list().data[0].id
TOOL_MODEL = _openai(TOOL_URL).models.list().data[0].id


def openai_chats_and_completions() -> None:
    client = _openai(URL)
    assert client.models.retrieve(MODEL).id == MODEL
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert client.completions.create(model=MODEL, prompt=TEXT, max_tokens=4).choices[0].text
    raw = client.chat.completions.with_raw_response.create(**asked, extra_headers={"x-request-id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"


def openai_async() -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="x") as client:
            asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "stream": True}
            return "".join(
                [chunk.choices[0].delta.content or "" async for chunk in await client.chat.completions.create(**asked)]
            )

    assert asyncio.run(ask())


def openai_errors() -> None:
    client = _openai(URL)
    for fields, kind, param in (
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"response_format": {"type": "yaml"}}, openai.BadRequestError, "response_format.type"),
    ):
        with pytest.raises(kind) as refusal:
            client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES} | fields)
        assert refusal.value.param == param


def openai_responses() -> None:
    client = _openai(URL)
    asked = {"model": MODEL, "input": TEXT, "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text
    assert whole.usage.input_tokens > 100
    with client.responses.stream(**asked) as stream:
        assert (
            "".join(event.delta for event in stream if event.type == "response.output_text.delta") == whole.output_text
        )
    again = client.responses.create(**asked | {"input": [{"role": "user", "content": TEXT}, *whole.output, *MESSAGES]})
    assert again.usage.input_tokens > 2 * whole.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(**asked, previous_response_id=whole.id)
    assert refusal.value.param == "previous_response_id"


def openai_tools_and_parse() -> None:
    client = _openai(TOOL_URL)
    function = openai.pydantic_function_tool(Look, name="look")
    asked = {"model": TOOL_MODEL, "messages": MESSAGES, "tools": [function]}
    parsed = client.chat.completions.parse(**asked).choices[0].message.tool_calls[0]
    assert parsed.function.parsed_arguments == Look(at=7)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.tool_calls[0].function.parsed_arguments == Look(at=7)
    functions = [{"type": "function", "name": "look", "strict": True, "parameters": SCHEMA}]
    called = client.responses.parse(model=TOOL_MODEL, input=TEXT, tools=functions).output[1]
    assert called.parsed_arguments == {"at": 7}
    answered = {"type": "function_call_output", "call_id": called.call_id, "output": "5"}
    asked_again = [*MESSAGES, {k: v for k, v in called.model_dump().items() if k != "parsed_arguments"}, answered]
    assert client.responses.create(model=TOOL_MODEL, input=asked_again, tools=functions).output
    # What a tiny model says is no JSON, and its engine says that it cannot see to it.
    with pytest.raises((ValidationError, openai.BadRequestError)):
        _openai(URL).responses.parse(model=MODEL, input="hi", text_format=Look, max_output_tokens=4)


def anthropic_messages() -> None:
    client = _anthropic(URL)
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        usage = stream.get_final_message().usage
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    for each in (whole.usage, usage):
        assert each.output_tokens == whole.usage.output_tokens
        assert each.input_tokens + each.cache_read_input_tokens + each.cache_creation_input_tokens == counted
    with pytest.raises(anthropic.NotFoundError) as refusal:
        client.messages.create(**asked | {"model": "other"})
    assert refusal.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as refusal:
        client.messages.create(**asked | {"max_tokens": 0})
    assert refusal.value.body["type"] == "error"


def anthropic_tools() -> None:
    client = _anthropic(TOOL_URL)
    asked = {"model": TOOL_MODEL, "max_tokens": 99, "tools": [{"name": "look", "input_schema": SCHEMA}]}
    whole = client.messages.create(**asked, messages=MESSAGES)
    assert (whole.stop_reason, whole.content[1].input) == ("tool_use", {"at": 7})
    with client.messages.stream(**asked, messages=MESSAGES) as stream:
        assert stream.get_final_message().content[1].input == {"at": 7}
    result = {"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "5"}
    turns = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**asked, messages=turns).content


def openai_prompt_caching() -> None:
    client = _openai(URL)
    part = {"type": "text", "text": f"Somebody marks this. {TEXT}", "prompt_cache_breakpoint": {"mode": "explicit"}}
    asked = {"model": MODEL, "max_tokens": 4, "temperature": 0, "prompt_cache_key": "checks"}

    def ask(question: str) -> tuple[int, int]:
        messages = [{"role": "system", "content": [part]}, {"role": "user", "content": question}]
        details = client.chat.completions.create(**asked, messages=messages).usage.prompt_tokens_details
        return details.cached_tokens, details.cache_write_tokens

    read, written = ask("What is it? ")
    assert (read, written > 0) == (0, True)
    assert ask("Where is it? ") == (written, 0)
    listed = client.get("/contexts", cast_to=object)
    kept = [each["id"] for each in listed["data"] if each["tokens"] == written]
    assert client.delete(f"/contexts/{kept[0]}", cast_to=object)["deleted"]
    with pytest.raises(openai.NotFoundError):
        client.delete(f"/contexts/{kept[0]}", cast_to=object)


def anthropic_prompt_caching() -> None:
    client = _anthropic(URL)
    block = {"type": "text", "text": f"Anthropic marks this. {TEXT}", "cache_control": {"type": "ephemeral"}}
    asked = {"model": MODEL, "max_tokens": 4, "system": [block]}
    first = client.messages.create(**asked, messages=[{"role": "user", "content": "What is it?"}]).usage
    assert first.cache_creation.ephemeral_5m_input_tokens == first.cache_creation_input_tokens > 0
    with client.messages.stream(**asked, messages=[{"role": "user", "content": "Where is it?"}]) as stream:
        again = stream.get_final_message().usage
    assert (again.cache_read_input_tokens, again.cache_creation_input_tokens) == (first.cache_creation_input_tokens, 0)


def anthropic_async() -> None:
    async def ask() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=URL, api_key="x") as client,
            client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=4) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask())


def langchain() -> None:
    model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="x", max_tokens=6, temperature=0, stream_usage=True)
    whole = model.invoke(TEXT)
    assert whole.usage_metadata["input_tokens"] > 100
    assert "".join(chunk.text for chunk in model.stream(TEXT)) == whole.text

    @tool
    def look(at: int) -> str:
        """Looks."""
        return str(at)

    calling = ChatOpenAI(model=TOOL_MODEL, base_url=f"{TOOL_URL}/v1", api_key="x").bind_tools([look])
    assert calling.invoke(TEXT).tool_calls[0]["args"] == {"at": 7}
    responses = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="x", use_responses_api=True, max_tokens=6)
    assert responses.invoke(TEXT).text


def litellm_sdk() -> None:
    asked = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "api_key": "x"}
    openai_way = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"}
    whole = litellm.completion(**asked, **openai_way).choices[0].message.content
    chunks = litellm.completion(**asked, **openai_way, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert litellm.completion(**asked, model=f"anthropic/{MODEL}", api_base=URL).choices[0].message.content == whole


def litellm_prompt_caching() -> None:
    """In front of what it takes for a proxy LiteLLM leaves `cache_control` in chats; for OpenAI's own models it takes it out."""
    asked = {"model": f"litellm_proxy/{MODEL}", "api_base": f"{URL}/v1", "api_key": "x", "max_tokens": 4}
    part = {"type": "text", "text": f"LiteLLM marks this. {TEXT}", "cache_control": {"type": "ephemeral"}}

    def ask(question: str) -> tuple[int, int]:
        messages = [{"role": "system", "content": [part]}, {"role": "user", "content": question}]
        details = litellm.completion(**asked, messages=messages).usage.prompt_tokens_details
        return details.cached_tokens, details.cache_write_tokens

    read, written = ask("What is it? ")
    assert (read, written > 0) == (0, True)
    assert ask("Where is it? ") == (written, 0)


def examples() -> None:
    """Those of SDKs, as a reader runs them."""
    for name in ("openai_sdk", "anthropic_sdk", "langchain_chat"):
        command = [sys.executable, f"examples/{name}.py"]
        subprocess.run(command, check=True, env=os.environ | {"MODEL": MODEL}, timeout=EXAMPLE_S)


CHECKS = (
    openai_chats_and_completions, openai_async, openai_errors, openai_responses, openai_tools_and_parse,
    anthropic_messages, anthropic_tools, anthropic_async, openai_prompt_caching, anthropic_prompt_caching, langchain, litellm_sdk,
    litellm_prompt_caching, examples,
)  # fmt: skip


def main() -> int:
    """The status: 0 if all clients got what they ask for."""
    print(json.dumps({name: version(name) for name in ("openai", "anthropic", "langchain-openai", "litellm")}))
    failed = 0
    for check in CHECKS:
        try:
            check()
        except Exception as error:
            failed += 1
            print(f"FAILED  {check.__name__}: {type(error).__name__}: {error}")
            traceback.print_exception(error, limit=2)
        else:
            print(f"ok      {check.__name__}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
