"""What a node remembers of its role, in a file beside its engine's log: a restart must not undo a conversion.

The role of the configuration is where a node starts. It counts again when it has been changed since: what an operator writes
into the file last is what he gets.
"""

import logging
from pathlib import Path
from typing import Final

import msgspec

from node.config import ROLES, NodeConfig
from pd_cluster.conversion import MAX_EPOCH, CommandOutcome, Conversion
from transport.control.durable import write_durably

log = logging.getLogger(__name__)

SUFFIX: Final = ".role.json"


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """`configured` is what the configuration said when this was written. Without an outcome, `epoch` was under way."""

    configured: str
    role: str
    epoch: int
    target: str
    outcome: CommandOutcome
    detail: str = ""


class RoleMemory:
    """One node's file."""

    def __init__(self, config: NodeConfig) -> None:
        self.path = Path(config.run_dir) / f"{config.node_id}{SUFFIX}"
        self._configured = config.role

    def recall(self) -> Conversion:
        """The role to start with. A file that cannot be read is as good as none."""
        found = self._read()
        if found is None:
            return Conversion(role=self._configured, target=self._configured)
        if (
            found.epoch > MAX_EPOCH
        ):  # written before epochs had a limit: every command after it would be stale, for ever
            log.warning("%s: epoch %d is the largest possible and is forgotten", self.path, found.epoch)
            found = msgspec.structs.replace(found, epoch=0)
        role = found.role if found.configured == self._configured else self._configured
        outcome = found.outcome if found.outcome is not CommandOutcome.PENDING else CommandOutcome.INTERRUPTED
        if role != self._configured:
            log.info("the node has the role %s, as epoch %d wanted, not %s", role, found.epoch, self._configured)
        return Conversion(role=role, epoch=found.epoch, target=found.target, outcome=outcome, detail=found.detail)

    def _read(self) -> Remembered | None:
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=Remembered)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
            log.warning("%s cannot be read, the configuration's role counts: %s", self.path, exc)
            return None
        return found if found.epoch >= 0 and {found.role, found.configured, found.target} <= {*ROLES} else None

    def write(self, conversion: Conversion) -> None:
        """Blocks. A node or a machine that dies in the middle of it finds what was there before. Raises OSError."""
        entry = Remembered(
            configured=self._configured,
            role=conversion.role,
            epoch=conversion.epoch,
            target=conversion.target,
            outcome=conversion.outcome,
            detail=conversion.detail,
        )
        write_durably(self.path, msgspec.json.encode(entry))
