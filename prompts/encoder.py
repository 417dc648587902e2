"""Text to token ids: by fastokens where that is equal to tokenizers, else by tokenizers.

fastokens takes a tenth to a hundredth of the time. It is another program, though, and wrong tokens are the worst of all
errors: so it is believed for a tokenizer only after a comparison on texts that would tell (prompts.probes), and of the texts
that come later a few are compared, too, in a thread beside. Once it differs it is not asked again.

    plain ──built, equal on every probe──► fast ──a text differs, or it raises──► plain, for good
      └─────not installed, not of its kind, or unequal: plain, with the reason

fastokens remembers the words that it has met, a bounded number of them however long they are (0.3.5): 5 to 10 bytes for each of
their characters. With words as languages have them that is some 100 MB at most; long ones, as of base64, are counted, and
after so many another twin takes the place of the one that remembers them.
"""

import json
import logging
import os
from collections.abc import Callable
from itertools import count
from threading import Lock, Thread
from typing import Final, Protocol

import numpy as np
from tokenizers import Tokenizer

from prompts.probes import probes
from prompts.segments import TokenArray, token_array

log = logging.getLogger("prfaas.prompts")

CHECKED_FIRST: Final = 16  # texts compared at first, then one of so many:
CHECKED_EVERY: Final = 256
CHECKED_CHARS: Final = 8192  # of a longer text a part: 3 ms of tokenizers
# One thread: several gain little on what a request asks for, and cost processor time while they wait for each other.
THREADS: Final = ("FASTOKENS_BPE_THREADS", "1")


LONG_CHARS: Final = 64  # of a word: fewer, and their bounded number is bound enough
RENEWED_CHARS: Final = 8 << 20  # of long words: 80 MB
NUMPY_CHARS: Final = 4096  # from so many on numpy is the faster one: 0.26 ms for 420 KB


class Fast(Protocol):
    """What is asked of a `fastokens.Tokenizer`."""

    def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]: ...


class NotEqual(Exception):
    """Why a tokenizer has no fast twin, in a word for a metric."""


def in_a_thread(work: Callable[[], None]) -> None:
    """Runs `work`, which takes milliseconds, or a second for another twin of a large vocabulary, beside."""
    Thread(target=work, name="check tokens").start()


class Encoder:
    """Encodes texts by one tokenizer. Thread-safe.

    `generation` changes when tokens that were handed out before may have been wrong: what is remembered of them should be
    found no more. It has to be asked for before the tokens are.
    """

    def __init__(self, tokenizer: Tokenizer, later: Callable[[Callable[[], None]], None] = in_a_thread) -> None:
        self.generation = 0
        self.why_plain = ""  # once it is known
        self._plain = tokenizer
        self._fast: Fast | None = None
        self._later = later
        self._numbers = count()
        self._checking = Lock()
        self._swapping = Lock()
        self._again: Callable[[Tokenizer], Fast] = native_twin
        self._splits = splits_at_spaces(tokenizer)
        self._remembered_chars = 0  # threads may lose some of each other's: a bound that is nearly kept
        self._counted: Callable[[str], object] = str

    @property
    def is_fast(self) -> bool:
        """Whether fastokens is asked."""
        return self._fast is not None

    def hasten(
        self, twin_of: Callable[[Tokenizer], Fast] | None = None, again: Callable[[Tokenizer], Fast] | None = None
    ) -> None:
        """Uses fastokens from now on, if it can be: a second of work for a large vocabulary, and 150 MB. `again` makes another of
        what `twin_of` has compared.
        """
        if self._fast is not None or self.why_plain:
            return
        try:
            self._fast = (twin_of or fast_twin)(self._plain)
            self._again = again or native_twin
        except NotEqual as reason:
            self.why_plain = str(reason)
            log.warning("tokenizers is used, fastokens is not (%s): %s", reason, reason.__cause__ or "no more is known")
            self._counted(self.why_plain)

    def report_to(self, counted: Callable[[str], object]) -> None:
        """`counted` is told why fastokens is not used (any more), now or when that happens, by whichever thread sees it."""
        self._counted = counted
        if self.why_plain:
            counted(self.why_plain)

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenArray:
        """The tokens of `text`."""
        fast = self._fast
        if fast is None:
            return _plainly(self._plain, text, add_special_tokens)
        try:
            tokens = _fast(fast, text, add_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust's is no Exception
            tokens = _plainly(self._plain, text, add_special_tokens)  # or raises what is wrong with the text
            self.distrust("raised", repr(error))
            return tokens
        number = next(self._numbers)
        if (number < CHECKED_FIRST or number % CHECKED_EVERY == 0) and self._checking.acquire(blocking=False):
            self._check_later(fast, number, text, tokens, add_special_tokens)
        self._remembered_chars += long_chars(text) if self._splits else len(text)
        if self._remembered_chars >= RENEWED_CHARS:
            self._remembered_chars = 0
            self._renew_later(fast)
        return tokens

    def distrust(self, why: str, what: str) -> None:
        """Asks fastokens no more. `why` is a word for a metric."""
        with self._swapping:
            if self._fast is None:
                return
            self._fast = None
        self.generation = 1
        self.why_plain = why
        log.error("fastokens is not believed any more (%s): %s", why, what)
        self._counted(why)

    def _check_later(self, fast: Fast, number: int, text: str, tokens: TokenArray, add_special_tokens: bool) -> None:
        """One at a time: what would have to wait is left out."""

        def check() -> None:
            try:
                part, found = text, tokens
                if len(text) > CHECKED_CHARS:
                    start = number * CHECKED_CHARS // 3 % (len(text) - CHECKED_CHARS)
                    part = text[start : start + CHECKED_CHARS]
                    found = _fast(fast, part, add_special_tokens)
                if not np.array_equal(found, _plainly(self._plain, part, add_special_tokens)):
                    self.distrust("differs", f"{len(part)} characters of text number {number}")
            finally:
                self._checking.release()

        try:
            self._later(check)
        except RuntimeError as error:  # no more threads
            self._checking.release()
            log.warning("a text was not compared: %s", error)

    def _renew_later(self, old: Fast) -> None:
        def renew() -> None:
            try:
                another = self._again(self._plain)
            except Exception as error:  # what was built once, of the same vocabulary
                log.warning("fastokens goes on with what it remembers: %s", error)
                return
            with self._swapping:
                if self._fast is old:
                    self._fast = another

        try:
            self._later(renew)
        except RuntimeError as error:  # no more threads
            log.warning("fastokens goes on with what it remembers: %s", error)


def splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether words are looked up one by one: a tokenizer that does not split takes a whole text for a word."""
    text = "a a"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    return tokenizer.pre_tokenizer is not None and len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) > 1


def long_chars(text: str) -> int:
    """Characters, or in a long text bytes, between spaces that are far apart: of words that may be split further, too."""
    if len(text) < LONG_CHARS:
        return 0
    if len(text) < NUMPY_CHARS:
        return sum(len(word) for word in text.split() if len(word) >= LONG_CHARS)
    characters = np.frombuffer(text.encode(errors="replace"), np.uint8)
    words = np.diff(np.flatnonzero(characters <= ord(" ")), prepend=-1, append=len(characters)) - 1
    return int(words[words >= LONG_CHARS].sum())


def native_twin(tokenizer: Tokenizer) -> Fast:
    """A fastokens tokenizer of the same description."""
    from fastokens import Tokenizer as FastTokenizer  # takes memory only where it is wanted

    twin: Fast = FastTokenizer.from_json_str(tokenizer.to_str())
    return twin


def fast_twin(tokenizer: Tokenizer) -> Fast:
    """A fastokens tokenizer that is equal to `tokenizer` on every probe. Raises NotEqual."""
    model = json.loads(tokenizer.to_str())["model"]
    if model.get("type", "BPE") != "BPE" or model.get("dropout"):
        raise NotEqual("unsupported")
    os.environ.setdefault(*THREADS)  # read when the first one is built
    try:
        twin = native_twin(tokenizer)
        texts = list(probes(tokenizer))
        for text in texts:
            if not np.array_equal(_fast(twin, text, False), _plainly(tokenizer, text, False)):
                raise NotEqual("unequal") from ValueError(f"other tokens for {text[:80]!r}")
        for text in texts[::16]:
            if not np.array_equal(_fast(twin, text, True), _plainly(tokenizer, text, True)):
                raise NotEqual("unequal") from ValueError(f"other special tokens for {text[:80]!r}")
    except (NotEqual, KeyboardInterrupt, SystemExit):
        raise
    except ImportError as error:
        raise NotEqual("not_installed") from error
    except BaseException as error:  # a panic of Rust's is no Exception
        raise NotEqual("unsupported") from error
    return twin


def _plainly(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> TokenArray:
    # A batch of one: it lets go of the interpreter's lock, which `encode` holds (0.5 s for 400 kB).
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return token_array(encoding.ids)


def _fast(tokenizer: Fast, text: str, add_special_tokens: bool) -> TokenArray:
    # Without a Python object per token; it lets go of the interpreter's lock.
    ids, _ = tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
    return np.frombuffer(ids, np.dtype("<u4")).view(np.uint32)
