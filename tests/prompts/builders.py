"""A small tokenizer with everything that real ones have."""

import functools
from datetime import datetime

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from prompts.chat.template import ChatTemplate
from prompts.tokens.tokenizer import TextTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog and the cat sat on the mat while it rained all day long "
    tokenizer.train_from_iterator([text * 3, "don't won't 123 456 hello world, hello there"], trainer)
    return str(tokenizer.to_str())


def bpe() -> Tokenizer:
    """A byte-level BPE with merges and special tokens, trained in milliseconds."""
    return Tokenizer.from_str(_trained())


def fixed_clock() -> datetime:
    return datetime(2026, 1, 2, 3, 4, 5)


@functools.cache
def chat_template(source: str = TEMPLATE) -> ChatTemplate:
    """A template is compiled once: it remembers nothing of what it renders."""
    return ChatTemplate(source, {"bos_token": "<s>"}, fixed_clock)


def text_tokenizer() -> TextTokenizer:
    return TextTokenizer(bpe(), chat_template())
