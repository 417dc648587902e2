"""What the CPU build lacks: shared memory whose names go."""

from engine.vllm.cpu import cpu_build


def test_names_of_memory_that_ranks_share_go_and_those_of_others_stay(tmp_path, monkeypatch):
    mine, theirs = tmp_path / "vllm_dist_a-pp:0-[0-1]-cpushm_0", tmp_path / "vllm_dist_b-tp:0-[0-1]-cpushm_0"
    for path in (mine, theirs):
        path.touch()
    monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)
    cpu_build.unlink_shared_memory(tmp_path)
    assert mine.exists()
    monkeypatch.setenv("VLLM_DIST_IDENT", "vllm_dist_a")
    cpu_build.unlink_shared_memory(tmp_path)
    assert list(tmp_path.iterdir()) == [theirs]
