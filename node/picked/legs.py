"""What nodes say to each other of the prefill of a picked request, as JSON over HTTP.

decode node                                prefill node
  | GET  PLACE_PATH --------------------->  |
  |  <--------------------- PrefillPlace    |   whose ticket it will be
  | POST LEG_PATH  PrefillAsked --------->  |   its engine computes the tokens, its agent pushes the KVCache
  |  <----------------------- LegAnswer     |   once all of it has been verified here, or why not
"""

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from node.control.holders import MAX_NAME
from transport.control.messages import TicketInfo

PLACE_PATH: Final = "/prfaas/place"
LEG_PATH: Final = "/prfaas/prefill"
MAX_LABEL_CHARS: Final = 40
OUTCOME: Final = "kv_transfer_params"

TokenIds = Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(min_length=2)]
_UNFIT: Final = re.compile(r"[^A-Za-z0-9_.-]")


class PrefillPlace(msgspec.Struct, frozen=True):
    """Which node it is, and for which layout of KVCache; "" before its first engine."""

    place: str
    layout_fingerprint: str = ""


class PrefillAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A leg: these tokens, under that ticket, named as `salt` and `namespace` say."""

    request_id: Annotated[str, Meta(max_length=256)]
    tokens: TokenIds
    ticket: TicketInfo
    salt: str
    namespace: str = ""
    tenant: Annotated[str, Meta(max_length=MAX_NAME)] = ""


class LegAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; `reason` is a label if nothing was delivered."""

    delivered: bool = False
    reason: str = ""
    bytes_total: int = 0
    cached_tokens: int = 0


class _EngineError(msgspec.Struct):
    code: str | int | None = None


class _EngineAnswer(msgspec.Struct):
    kv_transfer_params: LegAnswer | None = None
    error: _EngineError | None = None


_ANSWER: Final = msgspec.json.Decoder(_EngineAnswer)


def engine_body(asked: PrefillAsked, served_model: str) -> bytes:
    """A leg as the engine of the prefill node is asked it; the one token that the API makes it ask for is not used."""
    params: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "ticket": asked.ticket,
        "salt": asked.salt,
        **({"tenant": asked.tenant} if asked.tenant else {}),
    }
    said: dict[str, Any] = {"model": served_model, "prompt": asked.tokens, "max_tokens": 1, "stream": False}
    if asked.namespace:
        said["cache_salt"] = asked.namespace
    return msgspec.json.encode({**said, OUTCOME: params})


def leg_answer(status: int, body: bytes) -> LegAnswer:
    """What the engine's answer to a leg comes to."""
    try:
        told = _ANSWER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LegAnswer(reason="bad_answer")
    if status != 200:
        return LegAnswer(reason=label(str((told.error and told.error.code) or status)))
    found = told.kv_transfer_params or LegAnswer()
    return found if found.delivered else LegAnswer(reason=label(found.reason) or "not_delivered")


def label(reason: str) -> str:
    """Another process's word as a metric label: short, and of few characters."""
    return _UNFIT.sub("_", reason)[:MAX_LABEL_CHARS]
