"""The model that a topology names: found, built when it is one of the tiny ones, or what stands in for it."""

from collections.abc import Callable
from pathlib import Path

from engine.errors import EngineError
from engine.torch.tiny import build_model
from prfaas.errors import StartError, TopologyError
from prfaas.system.standin import write_stand_ins
from prfaas.system.topology import ModelChoice


def ensure_model(choice: ModelChoice, state_dir: Path, report: Callable[[str], None]) -> Path:
    """The model's directory. Builds a tiny one that is not there yet. Raises TopologyError, StartError."""
    directory = choice.directory(state_dir)
    if choice.profile:
        write_stand_ins(Path(choice.profile), choice.scale, directory)
        return directory
    if (directory / "config.json").is_file():
        return directory
    if choice.path:
        raise TopologyError(f"[model]: path = {choice.path!r}: it must be a model directory, with a config.json")
    build(choice.arch, directory, choice.seed, False, report)
    return directory


def build(arch: str, directory: Path, seed: int, overwrite: bool, report: Callable[[str], None]) -> None:
    """Writes a tiny model. Raises StartError."""
    try:
        build_model(arch, directory, seed, overwrite=overwrite, report=report)
    except ImportError as exc:
        raise StartError(f"{exc.name} is not installed: pip install 'prfaas[embedded]'") from exc
    except EngineError as exc:
        raise StartError(str(exc)) from exc
