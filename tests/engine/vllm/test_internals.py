"""Only three modules reach beyond what vLLM offers to connectors."""

import ast
from pathlib import Path

import engine.vllm

# The connector's base class, its metrics, and what they are made with.
PUBLIC = {
    "vllm",
    "vllm.distributed",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.v1.kv_cache_interface",
}


BEYOND = {"cpu_build.py", "internals.py", "media.py"}


def imported(path: Path) -> set[str]:
    """Modules of vLLM that a module of ours imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name for name in found if name == "vllm" or name.startswith("vllm.")}


def test_privates_of_vllm_are_reached_from_three_modules_alone() -> None:
    modules = sorted(Path(engine.vllm.__path__[0]).rglob("*.py"))
    assert len(modules) > 10
    beyond = {path.name: imported(path) - PUBLIC for path in modules if path.name not in BEYOND}
    assert {name: names for name, names in beyond.items() if names} == {}
