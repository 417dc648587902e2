"""SGLang's plugin: `--disaggregation-transfer-backend prfaas`, beside the backends that SGLang knows.

SGLang 0.5.23 loads the entry points of group `sglang.srt.plugins` in each of its processes, before it reads its arguments.
Its list of backends is an enum and a function: the enum is replaced by one with another member, and the function, asked for that
one, answers with our classes.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, Final

BACKEND: Final = "prfaas"
HOME: Final = "sglang.srt.disaggregation.utils"


def register() -> None:
    """The entry point."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([BACKEND])
    HookRegistry.register(f"{HOME}.TransferBackend", with_ours(TransferBackend), HookType.REPLACE)
    HookRegistry.register(f"{HOME}.get_kv_class", kv_class, HookType.AROUND)


def with_ours(backends: type[Enum]) -> type[Enum]:
    """The same enum and `PRFAAS`."""
    members = {member.name: member.value for member in backends} | {BACKEND.upper(): BACKEND}
    return Enum(backends.__name__, members, module=backends.__module__)  # type: ignore[return-value]


def kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Our class of that kind, if our backend is asked for; else SGLang's."""
    if transfer_backend.value != BACKEND:
        return original(transfer_backend, class_type)
    from engine.sglang.disaggregation.disaggregation import CLASSES

    return CLASSES[class_type.value]
