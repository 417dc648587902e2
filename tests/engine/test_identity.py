"""What is another model is named otherwise, to the last byte, and nothing is read twice for it."""

import logging
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import identity
from engine.errors import ModelError
from engine.identity import model_files, model_identity

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


def test_every_border_of_pieces_counts(tmp_path, monkeypatch):
    """Files of several pieces, with the differing byte at the ends of each."""
    monkeypatch.setattr(identity, "PIECE_BYTES", 1000)
    model = directory(tmp_path / "m", {"config.json": b"{}", "w.bin": bytes(3500)})
    names = {model_identity(model)}
    for position in (0, 999, 1000, 1999, 2000, 2999, 3000, 3499):
        data = bytearray(3500)
        data[position] = 1
        (model / "w.bin").write_bytes(data)
        names.add(model_identity(model))
    assert len(names) == 9


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
    """As if its files had been written long ago (but for the change time, which nobody can set)."""
    for file in model_files(path):
        os.utime(file.path, (LONG_AGO_S, LONG_AGO_S))
    return path


@pytest.fixture
def settled(monkeypatch):
    """What was written a moment ago may be remembered."""
    monkeypatch.setattr(identity, "SETTLED_NS", -1)


def hashed_bytes(caplog, *args, **options) -> int:
    """How many bytes it takes to name a model, by its own word."""
    with caplog.at_level(logging.INFO, "engine.identity"):
        model_identity(*args, **options)
    return int(re.search(r"(\d+) bytes hashed now", caplog.messages[-1])[1])


ALL_BYTES = sum(map(len, FILES.values()))


def test_what_was_hashed_once_is_remembered(tmp_path, caplog, name, settled):
    model, memory = directory(tmp_path / "m"), tmp_path / "cache" / "digests"
    assert hashed_bytes(caplog, model, memory=memory) == ALL_BYTES
    assert hashed_bytes(caplog, model, memory=memory) == 0
    assert model_identity(model, memory=memory) == name
    (model / "parts" / "shard.bin").write_bytes(b"9876543210")
    assert hashed_bytes(caplog, model, memory=memory) == 10


def test_a_file_that_was_replaced_is_read_again_even_with_the_old_times(tmp_path, settled):
    """As a copy does that keeps times: same size, same modification time."""
    model, memory = aged(directory(tmp_path / "m")), tmp_path / "digests"
    name = model_identity(model, memory=memory)
    data = bytearray(FILES[WEIGHTS[0]])
    data[-1] ^= 1
    (model / WEIGHTS[0]).write_bytes(data)
    aged(model)
    assert model_identity(model, memory=memory) != name


def test_a_file_just_written_is_not_remembered(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(identity, "SETTLED_NS", 1 << 62)
    model, memory = directory(tmp_path / "m"), tmp_path / "digests"
    assert [hashed_bytes(caplog, model, memory=memory) for _ in range(2)] == [ALL_BYTES] * 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "empty", "directory"])
def test_damage_to_the_memory_costs_time_only(damage, tmp_path, caplog, settled):
    model, memory = directory(tmp_path / "m"), tmp_path / "digests"
    name = model_identity(model, memory=memory)
    data = bytearray(memory.read_bytes())
    data[-30] ^= 1  # within a digest
    spoilt = {"cut": data[:200], "flipped": data, "garbage": b"\xff\n\xff", "empty": b""}
    memory.unlink()
    if damage == "directory":
        memory.mkdir()
    else:
        memory.write_bytes(spoilt[damage])
    assert model_identity(model, memory=memory) == name
    if damage != "directory":
        assert hashed_bytes(caplog, model, memory=memory) == 0


def test_a_file_that_grows_while_it_is_read_is_said(tmp_path, monkeypatch):
    model = directory(tmp_path / "m")
    read = os.pread

    def growing(fd, length, offset):
        with (model / WEIGHTS[0]).open("ab") as file:
            file.write(b"x")
        return read(fd, length, offset)

    monkeypatch.setattr(os, "pread", growing)
    with pytest.raises(ModelError, match="changes while it is read"):
        model_identity(model)


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


def test_the_middle_of_a_large_file_counts(tmp_path):
    model = directory(tmp_path / "m", {"config.json": b"{}", "w.bin": b""})
    os.truncate(model / "w.bin", 50 << 20)
    before = model_identity(model)
    with (model / "w.bin").open("r+b") as file:
        file.seek(10 << 20)  # in neither the first, the middle nor the last megabyte
        file.write(b"\x01")
    assert model_identity(model) != before
