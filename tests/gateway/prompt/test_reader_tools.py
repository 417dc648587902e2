"""Chats with tools are read on the event loop only where that is short."""

import asyncio
import json

import pytest

from gateway.api.openai import Endpoint
from gateway.prompt.prompt import Hashing
from gateway.prompt.reader import PromptReader
from gateway.tasks import TaskSet
from tests.gateway.worlds import model_of, on_loop
from tests.prompts.builders import text_tokenizer

MODEL = model_of(Hashing(block_size=16, salt=b"salt"))


@pytest.mark.parametrize(("num_tools", "is_at_once"), [(4, True), (400, False)])
def test_a_chat_that_goes_on_with_many_tools_is_read_in_threads(num_tools: int, is_at_once: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "does one thing " * 4}}
    tokenizer, messages = text_tokenizer(), [{"role": "user", "content": "over the lazy dog " * 60}] * 41

    @on_loop
    async def scenario() -> None:
        reads = PromptReader(tokenizer, TaskSet(lambda name: pytest.fail(name)))
        try:
            for turns in (*(40,) * 6, 41):  # the first few are compared with the whole
                said = {"model": "m", "messages": messages[:turns], "tools": [tool] * num_tools}
                body = json.dumps(said, separators=(",", ":")).encode()
                reading = asyncio.ensure_future(reads.read(Endpoint.CHAT, body, MODEL))
                await asyncio.sleep(0)
                is_done = reading.done()
                await reading
            assert is_done is is_at_once
        finally:
            await reads.close()

    scenario()
