"""Gateway and engine read the same tokens: chats of all shapes, over templates that models really have, as vLLM reads them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.api.dialects.translation import call_in
from gateway.api.openai import Endpoint
from gateway.errors import BadRequest
from gateway.prompt.prompt import Hashing, PromptMemory, PromptModel, tokens_of_prompt
from prompts.conversations import Conversations
from prompts.tokens.tokenizer import TextTokenizer
from tests.vllm.chats import HISTORIES, MAX_MODEL_LEN, TEMPLATES, TOOLS, VllmReader, bodies, save_model
from tests.vllm.random_chats import Writer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.dimensions(start="chats"),
    pytest.mark.filterwarnings("ignore"),  # what vLLM's import warns of is not ours to mend
]
MODEL = PromptModel(names=("m",), max_model_len=MAX_MODEL_LEN, hashing=Hashing(16, b""))
REFUSED_HERE = {"tools: no type"}  # as OpenAI does
LEAST_TEMPLATES, LEAST_CHATS = 12, 500
DRAWN = 60  # by chance, for each template
LEAST_READ = 25  # of a template's chats; some refuse what others take


class Both:
    """One template, read by both. Its cases share what was read before, as those of a gateway do."""

    def __init__(self, directory: Path, template: str) -> None:
        self.template = template
        self.vllm = VllmReader(directory)
        self.tokenizer = TextTokenizer.load(directory)
        self.memory = PromptMemory(self.tokenizer)

    def ours(self, fields: dict[str, Any]) -> list[int] | None:
        """The tokens that the gateway goes by, None where it refuses."""
        body = json.dumps({"model": "m"} | fields, ensure_ascii=False).encode()
        try:
            call = call_in(Endpoint.CHAT, body)
            read = tokens_of_prompt(call, MODEL, self.memory, b"")
        except BadRequest:
            return None
        tokens: list[int] = read[0].tolist()
        return tokens


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Both]]:
    """Of all templates: a sample of this suite has them all, as one costs a second."""
    made = [Both(save_model(tmp_path_factory.mktemp("chats") / "model", path), path.stem) for path in TEMPLATES]
    yield made
    for each in made:
        each.vllm.close()


def test_every_chat_has_the_tokens_that_vllm_reads(readers: list[Both]) -> None:
    unlike = []
    for both in readers:
        read = 0
        for name, fields in bodies().items():
            expected = both.vllm.tokens(fields)
            if expected is None or name in REFUSED_HERE:
                continue  # refused, so that no node computes it
            read += 1
            if both.ours(fields) != expected:
                unlike.append((both.template, name))
        assert read >= LEAST_READ, both.template
    assert not unlike


def test_so_has_what_chance_writes(readers: list[Both]) -> None:
    for both in readers:
        writer, read = Writer(both.template), 0
        for _ in range(DRAWN):
            fields = writer.body()
            try:
                expected = both.vllm.tokens(fields)
            except TypeError:
                continue  # vLLM's own: an error 500
            if expected is not None:
                read += 1
                assert both.ours(fields) == expected, (both.template, json.dumps(fields))
        assert read, both.template


def test_a_chat_that_goes_on_has_them_too(readers: list[Both]) -> None:
    """What was read before is not read again: turn by turn it is still what vllm reads of the whole."""
    for both in readers:
        both.memory.conversations = Conversations(both.tokenizer, stride_bytes=64)
        for number, (name, history) in enumerate(HISTORIES.items()):
            fields: dict[str, Any] = {"tools": TOOLS["another order"]} if number % 2 else {}
            said = [*history, *HISTORIES["compact arguments"][:3], *HISTORIES["parts"]]
            for length in range(1, len(said) + 1):
                chat = fields | {"messages": said[:length]}
                expected = both.vllm.tokens(chat)
                if expected is not None:
                    assert both.ours(chat) == expected, (both.template, name, length)


def test_the_corpus_is_large() -> None:
    assert len(TEMPLATES) >= LEAST_TEMPLATES
    assert len(bodies()) * len(TEMPLATES) >= LEAST_CHATS
