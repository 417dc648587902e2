"""Only two modules reach beyond what vLLM offers to connectors."""

import ast
from pathlib import Path
from types import SimpleNamespace

import engine.vllm
from engine.vllm import internals
from engine.vllm.server.seeds import with_seeds_back, without_unread_seeds

# The connector's base class, its metrics, and what they are made with.
PUBLIC = {
    "vllm",
    "vllm.distributed",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.v1.kv_cache_interface",
}


def imported(path: Path) -> set[str]:
    """Modules of vLLM that a module of ours imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name for name in found if name == "vllm" or name.startswith("vllm.")}


def test_privates_of_vllm_are_reached_from_two_modules_alone() -> None:
    modules = sorted(Path(engine.vllm.__path__[0]).rglob("*.py"))
    assert len(modules) > 10
    beyond = {path.name: imported(path) - PUBLIC for path in modules if path.name not in {"internals.py", "media.py"}}
    assert {name: names for name, names in beyond.items() if names} == {}


def test_names_of_memory_that_ranks_share_go_and_those_of_others_stay(tmp_path, monkeypatch):
    mine, theirs = tmp_path / "vllm_dist_a-pp:0-[0-1]-cpushm_0", tmp_path / "vllm_dist_b-tp:0-[0-1]-cpushm_0"
    for path in (mine, theirs):
        path.touch()
    monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)
    internals.unlink_shared_memory(tmp_path)
    assert mine.exists()
    monkeypatch.setenv("VLLM_DIST_IDENT", "vllm_dist_a")
    internals.unlink_shared_memory(tmp_path)
    assert list(tmp_path.iterdir()) == [theirs]


def test_a_seed_is_not_used_for_a_token_that_nobody_reads() -> None:
    batch = SimpleNamespace(generators={0: "first", 2: "third"})
    runner = SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=[True, True, False]))
    sample = without_unread_seeds(lambda runner: dict(runner.input_batch.generators))
    keep_books = with_seeds_back(lambda runner: dict(runner.input_batch.generators))
    assert sample(runner) == keep_books(runner) == {2: "third"}
    assert batch.generators == {0: "first", 2: "third"}
