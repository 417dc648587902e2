"""Builders: a gateway before scripted nodes of two models, which have tokenizers of their own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.config.gateway import GatewayConfig
from gateway.config.models import ModelTable
from prompts.tokens.tokenizer import TextTokenizer
from tests.gateway.layouts import LAYOUT
from tests.gateway.memory.pipeline import Pipelined, pipeline
from tests.gateway.scripted import ScriptedNode
from tests.gateway.worlds import until
from tests.prompts.builders import chat_template, text_tokenizer
from transport.control.proto import node_pb2 as pb

OTHER = "other"
OTHER_LAYOUT = replace(LAYOUT, model="other-weights", block_size=32)
TABLE = ModelTable(name=OTHER, aliases=("sibling",), tokenizer_dir=Path("unused"))
LONG = "the quick brown fox jumps over the lazy dog " * 40


def byte_tokenizer() -> TextTokenizer:
    """One token for each byte: another vocabulary than `text_tokenizer` has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={mark: number for number, mark in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer, chat_template())


def tokenizers(config: GatewayConfig) -> TextTokenizer:
    """That of the model that this configuration is for."""
    return byte_tokenizer() if config.served_model == OTHER else text_tokenizer()


def bring(node: ScriptedNode, model: str = OTHER, layout: Any = OTHER_LAYOUT) -> None:
    """The node has started anew, with that model."""
    node.model_id, node.layout = model, layout
    node.become(pb.NODE_STATE_READY)


@asynccontextmanager
async def two_models(**fields: Any) -> AsyncIterator[Pipelined]:
    """The second node of each kind has the other model."""
    fields = {"models": (TABLE,), **fields}
    async with pipeline(remote=2, local=2, decode=2, tokenizers=tokenizers, **fields) as w:
        for nodes in (w.nodes.remote, w.nodes.local, w.nodes.decode):
            bring(nodes[1])
        await until(lambda: w.models.serves(OTHER) and w.models.serves(""))
        await until(lambda: sum(node.model == OTHER for node in w.clusters.nodes) == 3)
        yield w


async def ask(w: Pipelined, model: str, prompt: str = "hello there", **fields: Any) -> int:
    """The status of a completion of that model."""
    return (await w.complete(prompt, model=model, **fields)).status


async def error_of(w: Pipelined, model: str, prompt: str = "hello there") -> dict[str, Any]:
    """The error that a completion of that model is answered with."""
    answer = await w.complete(prompt, model=model)
    found: dict[str, Any] = await answer.json()
    return {"status": answer.status, **found["error"]}
