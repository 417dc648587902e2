"""A byte-level tokenizer for tiny models: every text has tokens, no vocabulary is downloaded.

256 byte tokens and four special ones are what an encoder can produce; the rest of the vocabulary are syllables that
only a model can choose, so that the output of random weights reads like a made-up language.
"""

from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prompts.chat.template import ChatTemplate
from prompts.tokens.tokenizer import TextTokenizer

VOCAB_SIZE: Final = 512
PAD, BOS, EOS, UNK = range(4)
SPECIAL_TOKENS: Final = ("<pad>", "<s>", "</s>", "<unk>")

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_SPACE: Final = "Ġ"  # how ByteLevel spells a space


def byte_vocabulary(size: int = VOCAB_SIZE) -> dict[str, int]:
    """Token text to id: special tokens, bytes, syllables, `size` in all."""
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *_syllables()]
    if size > len(words):
        raise ValueError(f"vocabulary of at most {len(words)} tokens, got {size}")
    return {word: index for index, word in enumerate(words[:size])}


def byte_tokenizer(size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(size), merges=[], unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def byte_text() -> TextTokenizer:
    """What a model directory with this tokenizer would be read as."""
    special = {"bos_token": SPECIAL_TOKENS[BOS], "eos_token": SPECIAL_TOKENS[EOS]}
    template = ChatTemplate(CHAT_TEMPLATE, special, datetime.now)
    return TextTokenizer(byte_tokenizer(), template, eos_token_ids=(EOS,))


def save_byte_tokenizer(directory: Path, max_tokens: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json as `transformers` and the gateway read them."""
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
        "unk_token": SPECIAL_TOKENS[UNK],
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2))


def _syllables() -> list[str]:
    open_ones = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
    closed_ones = [vowel + consonant for vowel in "aeiou" for consonant in "klmnrst"]
    return [
        *open_ones,
        *(_SPACE + syllable for syllable in open_ones),
        *closed_ones,
        *(_SPACE + s for s in closed_ones),
        "ou",
        "ai",
    ]
