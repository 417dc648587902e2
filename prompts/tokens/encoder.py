"""Text to token ids: by fastokens where that is equal to tokenizers, else by tokenizers.

fastokens takes a tenth to a hundredth of the time. It is another program, though, and wrong tokens are the worst of all
errors. So it is trusted for a tokenizer only after a comparison on telling texts (probes.py). A thread also compares a
few of the later texts. Once it differs it is never used again.

    plain ──built, equal on every probe──► fast ──a text differs, or it raises──► plain, for good
      └─────not installed, not of its kind, or unequal: plain, with the reason

The comparison's result is a value (`EncoderVerdict`). It takes seconds for a large vocabulary, so one process computes
it and hands it to others with the same tokenizer.

fastokens remembers words. Of long ones only so many characters are given to it (words.py); texts that have others are
encoded by tokenizers.
"""

import json
import logging
import os
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from random import Random
from string import ascii_lowercase
from threading import Lock, Thread
from time import process_time
from typing import Final, Protocol

import msgspec
import numpy as np
from tokenizers import Tokenizer

from prompts.tokens.probes import probes
from prompts.tokens.segments import TokenArray, token_array
from prompts.tokens.words import MOST_CHARS, LongWords, Splits, splits_of

log = logging.getLogger("prfaas.prompts")

CHECKED_FIRST: Final = 16  # texts compared at first, then one of so many:
CHECKED_EVERY: Final = 256
CHECKED_CHARS: Final = 8192  # of a longer text a part: 3 ms of tokenizers
# One thread: several gain little on what a request asks for, and cost processor time while they wait for each other.
THREADS: Final = ("FASTOKENS_BPE_THREADS", "1")

REPEATED_CHARS: Final = 20_000  # of texts by which it shows whether they are remembered
REPEATED_TEXTS: Final = 8
FASTER: Final = 3  # times, at a text that is remembered
LONG_WORDS: Final = "long_words"  # why a text is encoded by tokenizers


class Fast(Protocol):
    """The methods of a `fastokens.Tokenizer` that are used here."""

    def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]: ...


class EncoderVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result about a tokenizer's fast twin; `of` names both and the versions of their programs.

    `why_plain` says in a word why there is no twin, or is "". `splits` says what it remembers as a word.
    """

    of: str
    why_plain: str = ""
    splits: Splits = Splits.NEVER


class NotEqual(Exception):
    """The reason why a tokenizer has no fast twin, in a word for a metric."""


def in_a_thread(work: Callable[[], None]) -> None:
    """Runs `work`, which takes milliseconds, beside."""
    Thread(target=work, name="check tokens").start()


class TextEncoder:
    """Encodes texts by one tokenizer. Thread-safe.

    `generation` changes when tokens that were handed out before may have been wrong: caches must not find them any
    more. Read it before the tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        later: Callable[[Callable[[], None]], None] = in_a_thread,
        most_chars: int = MOST_CHARS,
    ) -> None:
        self.generation = 0
        self.why_plain = ""  # once it is known
        self.verdict: EncoderVerdict | None = None  # what was found out at the start
        self._plain = tokenizer
        self._fast: Fast | None = None
        self._distrusted: Fast | None = None  # freeing it would hold the interpreter's lock for 0.1 s
        self._later = later
        self._numbers = count()
        self._checking = Lock()
        self._swapping = Lock()
        self._most_chars = most_chars
        self._long_words: LongWords | None = None
        self.has_room = True  # until a text with long words was one too many for fastokens
        self._counted: Callable[[str], object] = str

    @property
    def is_fast(self) -> bool:
        """Whether fastokens is asked."""
        return self._fast is not None

    def hasten(self, twin_of: Callable[[Tokenizer], Fast] | None = None, known: EncoderVerdict | None = None) -> None:
        """Uses fastokens from now on, if it can be: 150 MB for a large vocabulary, and seconds unless the verdict is `known`."""
        if self._fast is not None or self.why_plain:
            return
        of = identity(self._plain)
        if known is not None and known.of == of:
            self.follow(known)
            return
        try:
            fast = (twin_of or fast_twin)(self._plain)
        except NotEqual as reason:
            self._stay_plain(EncoderVerdict(of=of, why_plain=str(reason)), reason.__cause__)
        else:
            self._use(fast, EncoderVerdict(of=of, splits=words_of(self._plain, fast)))

    def follow(self, verdict: EncoderVerdict) -> None:
        """Follows a `verdict` on the same tokenizer."""
        try:
            if verdict.why_plain:
                raise NotEqual(verdict.why_plain)
            fast = known_twin(self._plain)
        except NotEqual as reason:
            self._stay_plain(msgspec.structs.replace(verdict, why_plain=str(reason)), reason.__cause__)
        else:
            self._use(fast, verdict)

    def report_to(self, counted: Callable[[str], object]) -> None:
        """`counted` is told why fastokens is not used, at all, any more or for a text, by whichever thread sees it."""
        self._counted = counted
        if self.why_plain:
            counted(self.why_plain)

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenArray:
        """The tokens of `text`."""
        fast = self._fast
        if fast is None or not self._is_for_fast(text):
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
        return tokens

    def distrust(self, why: str, what: str) -> None:
        """Stops using fastokens. `why` is a word for a metric."""
        with self._swapping:
            if self._fast is None:
                return
            self._distrusted, self._fast = self._fast, None
        self.generation = 1
        self.why_plain = why
        log.error("fastokens is not trusted any more (%s): %s", why, what)
        self._counted(why)

    def _use(self, fast: Fast, verdict: EncoderVerdict) -> None:
        self.verdict = verdict
        self._long_words = LongWords(verdict.splits, self._most_chars)
        self._fast = fast

    def _stay_plain(self, verdict: EncoderVerdict, cause: BaseException | None) -> None:
        self.verdict = verdict
        self.why_plain = verdict.why_plain
        log.warning("tokenizers is used instead of fastokens (%s): %s", verdict.why_plain, cause or "no more is known")
        self._counted(verdict.why_plain)

    def _is_for_fast(self, text: str) -> bool:
        if self._long_words is None or self._long_words.have_room(text):
            return True
        if self.has_room:
            self.has_room = False
            log.warning(
                "fastokens remembers %d characters of long words: texts with others are slower", self._most_chars
            )
        self._counted(LONG_WORDS)
        return False

    def _check_later(self, fast: Fast, number: int, text: str, tokens: TokenArray, add_special_tokens: bool) -> None:
        """One at a time: what would have to wait is left out."""

        def check() -> None:
            try:
                part, found = text, tokens
                if len(text) > CHECKED_CHARS:
                    start = number * CHECKED_CHARS // 3 % (len(text) - CHECKED_CHARS)
                    part = text[start : start + CHECKED_CHARS]
                    if self._long_words is not None and not self._long_words.have_room(part):  # words are cut here
                        return
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


def identity(tokenizer: Tokenizer) -> str:
    """Names a tokenizer, and the programs by which it was compared."""
    try:
        programs = f"tokenizers {version('tokenizers')} fastokens {version('fastokens')}"
    except PackageNotFoundError:
        programs = "none"
    return sha256(f"{programs} {tokenizer.to_str()}".encode()).hexdigest()


def native_twin(tokenizer: Tokenizer) -> Fast:
    """A fastokens tokenizer of the same description."""
    from fastokens import Tokenizer as FastTokenizer  # takes memory only where it is wanted

    os.environ.setdefault(*THREADS)  # read when the first one is built
    twin: Fast = FastTokenizer.from_json_str(tokenizer.to_str())
    return twin


def fast_twin(tokenizer: Tokenizer) -> Fast:
    """A fastokens tokenizer that is equal to `tokenizer` on every probe. Raises NotEqual."""
    model = json.loads(tokenizer.to_str())["model"]
    if model.get("type", "BPE") != "BPE" or model.get("dropout"):
        raise NotEqual("unsupported")
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


def known_twin(tokenizer: Tokenizer) -> Fast:
    """A twin of a tokenizer that has been compared, in a process before this one. Raises NotEqual."""
    try:
        return native_twin(tokenizer)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust's is no Exception
        raise NotEqual("unsupported") from error


def words_of(tokenizer: Tokenizer, twin: Fast) -> Splits:
    """What `twin` remembers as a word: some split at blanks where the tokenizer does not, because no token goes across."""
    splits = splits_of(tokenizer)
    return Splits.BLANKS if splits is Splits.NEVER and not remembers_texts(twin) else splits


def remembers_texts(twin: Fast) -> bool:
    """Whether `twin` takes much less time for a text of short words that it has met."""
    rng = Random(7)
    short = ["".join(rng.choices(ascii_lowercase, k=5)) for _ in range(100)]
    texts = [" ".join(rng.choices(short, k=REPEATED_CHARS // 6)) for _ in range(2 * REPEATED_TEXTS)]
    for text in texts[:REPEATED_TEXTS]:  # what takes long at first, and once, is no sign of memory
        _fast(twin, text, False)
    # The fastest of several: what else a machine does makes some slower.
    new, met = (min(_time_s(twin, text) for text in texts[REPEATED_TEXTS:]) for _ in range(2))
    return met * FASTER < new


def _time_s(twin: Fast, text: str) -> float:
    start = process_time()
    _fast(twin, text, False)
    return process_time() - start


def _plainly(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> TokenArray:
    # A batch of one: it lets go of the interpreter's lock, which `encode` holds (0.5 s for 400 kB).
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return token_array(encoding.ids)


def _fast(tokenizer: Fast, text: str, add_special_tokens: bool) -> TokenArray:
    # Without a Python object per token; it lets go of the interpreter's lock.
    ids, _ = tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
    return np.frombuffer(ids, np.dtype("<u4")).view(np.uint32)
