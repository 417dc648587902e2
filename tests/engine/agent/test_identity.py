"""What is another model is named otherwise, to the last byte, and nothing is read twice for it."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.agent.identity import PIECE_BYTES, DigestMemory, model_files, model_identity
from engine.errors import ModelError

FILES = {
    "config.json": b'{"model_type": "llama", "hidden_size": 256}',
    "model-00001-of-00002.safetensors": np.random.default_rng(0).bytes(200_000),
    "model-00002-of-00002.safetensors": np.random.default_rng(1).bytes(70_001),
    "quantize_config.json": b'{"bits": 4}',
    "modeling_own.py": b"x = 1\n",
    "parts/shard.bin": b"0123456789",
    "tokenizer.json": b"{}",
}
WEIGHTS = [name for name in FILES if name.endswith((".safetensors", ".bin"))]
LONG_AGO_S = 1_000_000_000


def directory(root: Path, files=FILES) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return directory(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def name(model) -> str:
    return model_identity(model)


@given(st.sampled_from(sorted(FILES)), st.integers(0), st.integers(1, 255))
def test_any_other_byte_is_another_model(model, name, file, position, flipped):
    path = model / file
    data = bytearray(FILES[file])
    data[position % len(data)] ^= flipped
    path.write_bytes(data)
    try:
        if file == "config.json":  # may be no JSON any more
            try:
                assert model_identity(model) != name
            except ModelError:
                return
        assert model_identity(model) != name
    finally:
        path.write_bytes(FILES[file])


def test_every_border_of_pieces_counts(tmp_path):
    """A file of several pieces, with the differing byte at the ends of each, and in the midst of one."""
    model, size = directory(tmp_path / "m", {"config.json": b"{}", "w.bin": b""}), 2 * PIECE_BYTES + 1000
    os.truncate(model / "w.bin", size)
    names = {model_identity(model)}
    places = (0, 10 << 20, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES - 1, 2 * PIECE_BYTES, size - 1)
    for position in places:
        with (model / "w.bin").open("r+b") as file:
            file.seek(position)
            file.write(b"\x01")
            file.flush()
            names.add(model_identity(model))
            file.seek(position)
            file.write(b"\x00")
    assert len(names) == 1 + len(places)


def test_copies_are_one_model_wherever_they_lie(model, name, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("ours")
    (tmp_path / "copy" / ".git").mkdir()
    (tmp_path / "copy" / ".git" / "HEAD").write_text("ref")
    (tmp_path / "hub").mkdir()  # as a hub's cache has it: links to blobs
    for file in model_files(model):
        link = tmp_path / "hub" / file.name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(file.path)
    assert model_identity(tmp_path / "copy") == model_identity(tmp_path / "hub") == name


def test_names_and_places_of_files_count(model, name, tmp_path):
    moved = directory(tmp_path / "moved", {"a" + key if key.endswith(".bin") else key: FILES[key] for key in FILES})
    fewer = directory(tmp_path / "fewer", {key: FILES[key] for key in FILES if key != "parts/shard.bin"})
    assert len({name, model_identity(moved), model_identity(fewer)}) == 3


def test_bytes_that_wander_from_file_to_file_count(tmp_path):
    one = directory(tmp_path / "1", {"config.json": b"{}", "a.bin": b"12", "b.bin": b"3"})
    two = directory(tmp_path / "2", {"config.json": b"{}", "a.bin": b"1", "b.bin": b"23"})
    assert model_identity(one) != model_identity(two)


def test_facts_are_part_of_it(model, name):
    facts = [{}, {"lora": "a"}, {"lora": "b"}, {"quantization": "a"}, {"lora": "a", "quantization": "fp8"}]
    assert len({model_identity(model, facts=each) for each in facts}) == len(facts)
    assert model_identity(model, facts={"a": "1", "b": "2"}) == model_identity(model, facts={"b": "2", "a": "1"})


def test_a_revision_stands_for_what_the_weights_hold(model, tmp_path):
    names = {revision: model_identity(model, revision=revision) for revision in ("", "r1", "r2")}
    assert len(set(names.values())) == 3
    copy = directory(tmp_path / "copy")
    for weights in WEIGHTS:
        (copy / weights).write_bytes(bytes(len(FILES[weights])))
    assert model_identity(copy, revision="r1") == names["r1"]
    (copy / "quantize_config.json").write_bytes(b'{"bits": 8}')
    assert model_identity(copy, revision="r1") != names["r1"]


def aged(path: Path) -> Path:
    """As if its files had been written long ago (but for the change time, which cannot be set)."""
    for file in model_files(path):
        os.utime(file.path, (LONG_AGO_S, LONG_AGO_S))
    return path


def settled(path: Path) -> DigestMemory:
    """Remembers what was written a moment ago, too."""
    return DigestMemory(path, settled_ns=-1)


def hashed_bytes(model: Path, memory: DigestMemory) -> int:
    """How many bytes it takes to name a model."""
    model_identity(model, memory=memory)
    return memory.hashed_bytes


ALL_BYTES = sum(map(len, FILES.values()))


def test_what_was_hashed_once_is_remembered(tmp_path, name):
    model, memory = directory(tmp_path / "m"), tmp_path / "cache" / "digests"
    assert hashed_bytes(model, settled(memory)) == ALL_BYTES
    assert hashed_bytes(model, settled(memory)) == 0
    assert model_identity(model, memory=settled(memory)) == name
    (model / "parts" / "shard.bin").write_bytes(b"9876543210")
    assert hashed_bytes(model, settled(memory)) == 10


def test_a_file_that_was_replaced_is_read_again_even_with_the_old_times(tmp_path):
    """As a copy does that keeps times: same size, same modification time."""
    model, memory = aged(directory(tmp_path / "m")), tmp_path / "digests"
    name = model_identity(model, memory=settled(memory))
    data = bytearray(FILES[WEIGHTS[0]])
    data[-1] ^= 1
    (model / WEIGHTS[0]).write_bytes(data)
    aged(model)
    assert model_identity(model, memory=settled(memory)) != name


def test_a_file_just_written_is_not_remembered(tmp_path):
    model, memory = directory(tmp_path / "m"), tmp_path / "digests"
    unsettled = [DigestMemory(memory, settled_ns=1 << 62) for _ in range(2)]
    assert [hashed_bytes(model, each) for each in unsettled] == [ALL_BYTES] * 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "empty", "directory"])
def test_damage_to_the_memory_costs_time_only(damage, tmp_path):
    model, memory = directory(tmp_path / "m"), tmp_path / "digests"
    name = model_identity(model, memory=settled(memory))
    data = bytearray(memory.read_bytes())
    data[-30] ^= 1  # within a digest
    spoilt = {"cut": data[:200], "flipped": data, "garbage": b"\xff\n\xff", "empty": b""}
    memory.unlink()
    if damage == "directory":
        memory.mkdir()
    else:
        memory.write_bytes(spoilt[damage])
    assert model_identity(model, memory=settled(memory)) == name
    if damage != "directory":
        assert hashed_bytes(model, settled(memory)) == 0


def test_a_file_that_grows_after_it_was_listed_is_said(tmp_path):
    class Growing(DigestMemory):
        """Asked about a file just before it is read: then another process appends to it."""

        def get(self, file):
            with Path(file.path).open("ab") as appended:
                appended.write(b"x")
            return super().get(file)

    with pytest.raises(ModelError, match="changed while it was read"):
        model_identity(directory(tmp_path / "m"), memory=Growing(None))


@pytest.mark.parametrize("config", [None, b"", b"[]", b"\xff", b"{"])
def test_a_directory_without_a_configuration_is_no_model(config, tmp_path):
    tmp_path.joinpath("w.bin").write_bytes(b"1")
    if config is not None:
        tmp_path.joinpath("config.json").write_bytes(config)
    with pytest.raises(ModelError, match=r"config\.json"):
        model_identity(tmp_path)


def test_links_in_a_circle_end(tmp_path):
    model = directory(tmp_path / "m")
    name = model_identity(model)
    (model / "parts" / "up").symlink_to(model)
    assert model_identity(model) != ""
    (model / "parts" / "up").unlink()
    assert model_identity(model) == name
