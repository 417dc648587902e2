"""From the bytes of a call to its prompt: tokens, block hashes and digest. A function of values, for threads and processes.

Long bodies take seconds, and most of the steps hold the interpreter's lock: `gateway.prompt.reader` decides where this runs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, cast

import msgspec
import numpy as np
from msgspec.structs import replace

from gateway.api.cache_control import NO_CACHING, Breakpoint, Caching
from gateway.api.dialects.translation import call_in
from gateway.api.openai import Call, ChatOptions, Endpoint, field_of
from gateway.api.validation import MAX_ANSWERS, Tools, check_tools, too_many
from gateway.errors import BadRequest, unknown_model
from gateway.prompt.cache_breakpoints import NO_MARKS, PrefixMarks, breakpoints, unmarked
from gateway.prompt.media import TOKENS_EACH, Apart, MediaGuess, apart, may_have_media
from hybrid_cache.hashing.block_hash import Inset, namespace_of, namespaced
from hybrid_cache.hashing.chains import ChainCache
from prompts.conversations import Conversations
from prompts.errors import BadPrompt, TakesLonger
from prompts.reading import Chat, chat_tokens, completion_tokens, truncated
from prompts.tokens.ids import flat_ids
from prompts.tokens.segments import TokenArray, token_array
from prompts.tokens.tokenizer import TextTokenizer

# What the text of a chat depends on, beside its messages.
SAID: Final[tuple[str, ...]] = (
    "tools", "documents", "chat_template_kwargs", "add_generation_prompt", "reasoning_effort",
)  # fmt: skip
MEDIA: Final = "media"  # how such a prompt was read
MANY_IDS_BYTES: Final = 4 * 1024  # of JSON: more is decoded in pieces
ALONE: Final = "alone:"  # no namespace begins so
SEVERAL_PROMPTS: Final = "several_prompts"  # the code of a refusal that `gateway.pipeline.fanout` makes good
_PROMPT: Final = msgspec.json.Decoder(str | list[int | str | list[int]])
_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, Any]])
_LIST: Final = msgspec.json.Decoder(list[Any] | None)
_TOOLS: Final = msgspec.json.Decoder(Tools | None)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any] | None)


class Hashing(msgspec.Struct, frozen=True):
    """How the served model's blocks are named: tokens per block, the salt of the model, and which tenants share.

    Prompts of a `group`, and those with a `cache_salt` of the client's, have names of their own: no other prompt finds their
    blocks, nor learns that they are there. `key` makes namespaces that others cannot guess, by a secret
    (`hybrid_cache.hashing.name_secrets`). `earlier` is how blocks were named before its rotation, while they are looked for.
    """

    block_size: int
    salt: bytes
    group: str = ""
    key: bytes = b""
    earlier: "Hashing | None" = None

    def of_group(self, group: str) -> "Hashing":
        """The same for tenants of `group`."""
        earlier = None if self.earlier is None else self.earlier.of_group(group)
        return replace(self, group=group, earlier=earlier)

    def namespace(self, cache_salt: str | None) -> str:
        """Whose blocks those of a prompt are; "" is everybody's. Engines that have caches of their own get it as `cache_salt`."""
        return namespace_of(self.key, self.group, cache_salt or "")


class BlockNames(msgspec.Struct, frozen=True):
    """A prompt's names by one secret; the fields are those of `Prompt`."""

    hashes: list[bytes]
    digest: bytes
    salt: bytes
    namespace: str


class RevisionNames(msgspec.Struct, frozen=True):
    """A prompt's names in another revision of the model (`gateway.cluster.served_model`)."""

    revision: str
    names: BlockNames
    earlier: BlockNames | None = None


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as the clusters know it. `hashes` are those of the full blocks of its first N-1 tokens.

    `caching` is what is to be done with its KVCache. `how` it was read, for a metric: "continued" from where an earlier body had
    ended, or why as a whole. `salt` is that of `namespace`, which engines' names start from. KVCache of an `adapter`,
    or with media, is not that of the tokens alone. With media that no engine has read `num_tokens` is a `guess`, and no other
    prompt's blocks are called as its own; no more are those for an adapter. `earlier` are its names by the secret before the
    one that its others are by, while that one is still looked for. All these are names in one `revision` of the model; `others`
    are those in others.
    """

    num_tokens: int
    hashes: list[bytes]
    digest: bytes
    how: str = "completion"
    salt: bytes = b""
    namespace: str = ""
    caching: Caching = NO_CACHING
    adapter: str = ""
    has_media: bool = False
    guess: MediaGuess | None = None
    earlier: BlockNames | None = None
    revision: str = ""
    others: tuple[RevisionNames, ...] = ()

    @property
    def revisions(self) -> tuple[str, ...]:
        """In which it has names."""
        return (self.revision, *(each.revision for each in self.others))

    def within(self, revision: str) -> "Prompt":
        """The same prompt by its names in one of its revisions."""
        if revision == self.revision:
            return self
        found = next(each for each in self.others if each.revision == revision)
        own = RevisionNames(
            self.revision, BlockNames(self.hashes, self.digest, self.salt, self.namespace), self.earlier
        )
        return replace(
            self,
            hashes=found.names.hashes,
            digest=found.names.digest,
            salt=found.names.salt,
            namespace=found.names.namespace,
            earlier=found.earlier,
            revision=revision,
            others=(own, *(each for each in self.others if each is not found)),
        )

    def by_earlier_names(self) -> "Prompt":
        """The same prompt as it is known by the secret before."""
        names = self.earlier
        if names is None:
            return self
        return replace(
            self, hashes=names.hashes, digest=names.digest, salt=names.salt, namespace=names.namespace, earlier=None
        )

    @property
    def is_plain(self) -> bool:
        """Whether any engine of the model can compute it."""
        return not (self.has_media or self.adapter)

    @property
    def is_alone(self) -> bool:
        """Whether its KVCache depends on more than its blocks' names tell: it is not shared."""
        return self.guess is not None or bool(self.adapter)

    @property
    def transfer_tokens(self) -> int:
        """Tokens whose KVCache a prefill node computes: all but the last one."""
        return self.num_tokens - 1


class PromptModel(msgspec.Struct, frozen=True, kw_only=True):
    """What reading needs to know of the model served: the names it goes by, the longest context, how blocks are named.

    `adapters` of it are served, too, by names of their own; whether messages may have media in them, and at addresses of
    which domains. `hashing` is of one `revision`, and `others` are the other revisions that nodes have, with theirs.
    """

    names: tuple[str, ...]
    max_model_len: int
    hashing: Hashing
    adapters: frozenset[str] = frozenset()
    takes_media: bool = False
    media_domains: frozenset[str] = frozenset()
    revision: str = ""
    others: tuple[tuple[str, Hashing], ...] = ()


class PromptMemory:
    """A tokenizer, and what it and its readers remember of earlier prompts: all in its cache, which tenants share fairly."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.conversations = Conversations(tokenizer)
        self.chains = ChainCache(tokenizer.cache)


def read_call(
    endpoint: Endpoint,
    body: bytes,
    model: PromptModel,
    memory: PromptMemory,
    tenant: bytes = b"",
    answered: Sequence[int] = (),
) -> tuple[Call, Prompt]:
    """The call that `body` makes of `model`, and its prompt, with what has been `answered` after it.

    Raises ApiError, BadRequest above all.
    """
    call, marks = unmarked(call_in(endpoint, body))
    return call, prompt_of(call, model, memory, tenant, answered=answered, marks=marks)


def prompt_of(
    call: Call,
    model: PromptModel,
    memory: PromptMemory,
    tenant: bytes = b"",
    most_new: int | None = None,
    answered: Sequence[int] = (),
    marks: PrefixMarks = NO_MARKS,
) -> Prompt:
    """The prompt of `call`, with what has been `answered` after it. Raises ApiError, BadRequest above all.

    With `most_new`, TakesLonger for all but a chat that goes on, by so many bytes at most, and says no more besides.
    """
    check_name(call, model)
    if model.takes_media and (media := _media_of(call, model, most_new)) is not None:
        return _prompt_with(media, model, memory, tenant, marks)
    tokens, how = tokens_of_prompt(call, model, memory, tenant, most_new)
    prompt = prompt_from(call, tokens, how, model, memory, tenant, answered)
    if marks is NO_MARKS:
        return prompt
    caching = _unkept(marks) if prompt.is_alone else _caching(call, marks, tokens, memory, tenant)
    return replace(prompt, caching=caching)


def _media_of(call: Call, model: PromptModel, most_new: int | None) -> Apart | None:
    """The texts of a chat that has media in it; TakesLonger as `prompt_of`, BadRequest for a name that others may have given."""
    if call.endpoint is not Endpoint.CHAT or not may_have_media(call.fields["messages"]):
        return None
    if most_new is not None:
        raise TakesLonger
    may_be_named = not model.hashing.namespace(call.options.cache_salt)
    return apart(call, may_be_named=may_be_named, domains=model.media_domains)


def _prompt_with(media: Apart, model: PromptModel, memory: PromptMemory, tenant: bytes, marks: PrefixMarks) -> Prompt:
    """The prompt of texts with media between them: its tokens are guessed, its blocks named by what the media are."""
    tokens, _ = tokens_of_prompt(media.texts, model, memory, tenant)
    prompt = prompt_from(media.texts, tokens, MEDIA, model, memory, tenant, unread=media.digest)
    room = model.max_model_len - 1  # only the engine is sure that it fits
    guessed = max(prompt.num_tokens, min(room, prompt.num_tokens + media.number * TOKENS_EACH))
    unread = media.unread or ("truncated" if media.texts.options.truncate_prompt_tokens is not None else "")
    guess = MediaGuess(prompt.num_tokens, media.number, unread)
    return replace(prompt, num_tokens=guessed, caching=_unkept(marks), has_media=True, guess=guess)


def tokens_of_prompt(
    call: Call, model: PromptModel, memory: PromptMemory, tenant: bytes, most_new: int | None = None
) -> tuple[TokenArray, str]:
    """As `prompt_tokens`, and no more of them than the call wants to be left."""
    tokens, how = prompt_tokens(call, memory, tenant, most_new)
    if call.options.truncate_prompt_tokens is not None:
        tokens = _truncated(call, tokens, memory.tokenizer, model.max_model_len)
    return tokens, how


def prompt_from(
    call: Call,
    tokens: TokenArray,
    how: str,
    model: PromptModel,
    memory: PromptMemory,
    tenant: bytes = b"",
    answered: Sequence[int] = (),
    insets: Sequence[Inset] = (),
    unread: bytes = b"",
) -> Prompt:
    """The prompt of `call` that has `tokens`, with what has been `answered` after it. Raises BadRequest.

    `insets` are the media among them; `unread` is the digest of those that are not.
    """
    if not len(tokens):
        raise _invalid(call.endpoint.prompt_field, "the prompt is empty")
    check_length(call, len(tokens), model.max_model_len)
    if answered:
        tokens = np.concatenate([tokens, token_array(answered)])
    adapter = call.options.model if call.options.model in model.adapters else ""

    def names_by(hashing: Hashing) -> BlockNames:
        namespace = hashing.namespace(call.options.cache_salt)
        salt = namespaced(hashing.salt, namespace)
        named = namespaced(salt, f"{ALONE}{unread.hex()}/{adapter}") if adapter or unread else salt
        chain = memory.chains.chain(tokens, hashing.block_size, named, tenant, insets)
        return BlockNames(chain.hashes, chain.digest, salt, namespace)

    def earlier_by(hashing: Hashing) -> BlockNames | None:
        return None if hashing.earlier is None else names_by(hashing.earlier)

    names = names_by(model.hashing)
    return Prompt(
        len(tokens),
        names.hashes,
        names.digest,
        how,
        names.salt,
        names.namespace,
        adapter=adapter,
        has_media=bool(insets),
        earlier=earlier_by(model.hashing),
        revision=model.revision,
        others=tuple(RevisionNames(name, names_by(by), earlier_by(by)) for name, by in model.others),
    )


def check_name(call: Call, model: PromptModel) -> None:
    """Raises ApiError 404 for a model that is not served."""
    name = call.options.model
    if name not in model.names and name not in model.adapters:
        raise unknown_model(name, model.names[0])


def check_length(call: Call, num_tokens: int, max_model_len: int) -> None:
    """Raises BadRequest when prompt and answer do not fit into the model's context."""
    # A client that has a prompt cut to what fits gets as many tokens as are left, of engines, too.
    wanted = 1 if call.options.truncate_prompt_tokens is not None else call.options.output_tokens or 1
    if num_tokens + wanted <= max_model_len:
        return
    raise BadRequest(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{num_tokens + wanted} tokens ({num_tokens} in the prompt, {wanted} in the completion).",
        param=call.endpoint.prompt_field,
        code="context_length_exceeded",
    )


def prompt_tokens(
    call: Call, memory: PromptMemory, tenant: bytes, most_new: int | None = None
) -> tuple[TokenArray, str]:
    """The tokens that the prompt of `call` stands for, and how they were found. Raises BadRequest; TakesLonger as `prompt_of`."""
    try:
        if call.endpoint is Endpoint.CHAT:
            return _chat(call, memory, tenant, most_new)
        if most_new is not None:
            raise TakesLonger
        return _completion(call, memory.tokenizer, tenant), "completion"
    except BadPrompt as error:
        raise BadRequest(error.message, param=error.param, code=error.code) from error


def _caching(call: Call, marks: PrefixMarks, tokens: TokenArray, memory: PromptMemory, tenant: bytes) -> Caching:
    """What `marks` mean for the prompt of `call`, which is read as `tokens`. Raises BadRequest."""
    if call.endpoint is not Endpoint.CHAT:  # a text has no parts: its end is all that can be marked
        places = tuple(Breakpoint(mark.field, mark.ttl, len(tokens), len(tokens)) for mark in marks.marks)
    elif marks.marks:
        chat = replace(_said(call), messages=field_of(call.fields, "messages", _MESSAGES))
        read = partial(chat_tokens, tokenizer=memory.tokenizer, tenant=tenant)
        places = breakpoints(marks.marks, chat, tokens, read)
    else:
        places = ()
    return Caching(places, marks.category, marks.is_explicit)


def _unkept(marks: PrefixMarks) -> Caching:
    """What `marks` mean for a prompt whose blocks are not kept: each says so."""
    places = tuple(Breakpoint(mark.field, mark.ttl, 0, 0) for mark in marks.marks)
    return Caching(places, marks.category, marks.is_explicit)


def _said(call: Call) -> Chat:
    """The chat of `call` without its messages."""
    options = cast(ChatOptions, call.options)
    return Chat(
        messages=(),
        tools=field_of(call.fields, "tools", _LIST),
        documents=field_of(call.fields, "documents", _LIST),
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        add_special_tokens=options.add_special_tokens,
        chat_template_kwargs=field_of(call.fields, "chat_template_kwargs", _OBJECT),
        reasoning_effort=options.reasoning_effort,
    )


def _chat(call: Call, memory: PromptMemory, tenant: bytes, most_new: int | None) -> tuple[TokenArray, str]:
    options = cast(ChatOptions, call.options)
    said = {name: bytes(call.fields[name]) for name in SAID if name in call.fields}
    if most_new is not None and sum(map(len, said.values())) > most_new:  # decoded and rendered each time
        raise TakesLonger
    if options.tool_choice is not None or "tools" in call.fields:
        check_tools(field_of(call.fields, "tools", _TOOLS), options.tool_choice)
    chat = _said(call)
    raw = call.fields.get("messages")
    read = memory.conversations.tokens(b"" if raw is None else bytes(raw), said, chat, tenant, most_new)
    if read.tokens is not None:
        return read.tokens, read.how
    if most_new is not None:
        raise TakesLonger
    chat = replace(chat, messages=field_of(call.fields, "messages", _MESSAGES))
    return chat_tokens(chat, memory.tokenizer, tenant), read.how


def _completion(call: Call, tokenizer: TextTokenizer, tenant: bytes) -> TokenArray:
    raw = bytes(call.fields.get("prompt", b""))
    if len(raw) > MANY_IDS_BYTES and (ids := flat_ids(raw)) is not None:
        return _known(ids, tokenizer)
    prompt = field_of(call.fields, "prompt", _PROMPT)
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        if len(prompt) > MAX_ANSWERS:
            raise too_many(len(prompt), "prompt")
        raise BadRequest(
            "'prompt' must be one prompt here, not a list of prompts.", param="prompt", code=SEVERAL_PROMPTS
        )
    tokens = completion_tokens(prompt, tokenizer, add_special_tokens=call.options.add_special_tokens, tenant=tenant)
    return _known(tokens, tokenizer)


def _known(tokens: TokenArray, tokenizer: TextTokenizer) -> TokenArray:
    if len(tokens) and int(np.max(tokens)) > tokenizer.max_token_id:
        raise _invalid("prompt", f"token ids must be in [0, {tokenizer.max_token_id}]")
    return tokens


def _truncated(call: Call, tokens: TokenArray, tokenizer: TextTokenizer, max_model_len: int) -> TokenArray:
    """`tokens` cut as `truncate_prompt_tokens` says, by vLLM's rules. Raises BadRequest."""
    options = call.options
    most = options.truncate_prompt_tokens
    assert most is not None
    if most > max_model_len:
        raise _invalid("truncate_prompt_tokens", f"this model's context has {max_model_len} tokens")
    if most < 0:
        most = max_model_len - 1 if options.output_tokens else max_model_len
    is_text = call.endpoint is Endpoint.CHAT or b'"' in bytes(call.fields["prompt"])
    added = tokenizer.added if is_text and options.adds_special_tokens else (0, 0)
    return truncated(tokens, most, options.truncation_side, added)


def _invalid(param: str, what: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': {what}.", param=param, code="invalid_value")
