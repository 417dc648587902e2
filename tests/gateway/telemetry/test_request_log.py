"""The request log: lines that a planner replays, files that stay bounded, disks that are full."""

import json
import os
import shutil
import time
from collections import Counter
from io import FileIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.request_log import RequestLogConfig
from gateway.errors import GatewayConfigError
from gateway.request.request import RequestRecord
from gateway.telemetry.line_files import FILES, name_of, new_file
from gateway.telemetry.request_log import PATTERN, PREFIX, LogEntry, RequestLog, line_of
from planner.model.workload import infinite_cache_hits, read_trace
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
from tests.gateway.worlds import SERVED, on_loop, request_of, until, world
from transport.control.settings import SettingsError

LONG = "the quick brown fox jumps over the lazy dog " * 100


def record(total: int) -> RequestRecord:
    fields = {"seq": 1, "status": 200, "total": total, "fallbacks": [], "codecs": {}, "timeline": {}}
    return RequestRecord(**{name: fields.get(name, 0) for name in RequestRecord.__struct_fields__})


@on_loop
async def test_what_was_served_is_a_trace(tmp_path) -> None:
    log = RequestLogConfig(directory=tmp_path / "log")
    async with world(request_log=log) as w:
        for prompt in (LONG, LONG + "and once more " * 100, "short"):
            assert (await w.complete(prompt)).status == 200
        await w.idle()
        async with w.http.get("/prfaas/requests") as lines:
            records = [json.loads(line) async for line in lines.content]
    (path,) = log.directory.glob(PATTERN)
    assert path.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{name: line[name] for name in records[0]} for line in lines] == records
    assert not any("quick" in line for line in path.read_text().splitlines())
    trace = read_trace(log.directory)
    assert list(trace.prompt_tokens) == [each["total"] for each in records]
    assert list(trace.cached_tokens) == [each["cached"] for each in records]
    assert infinite_cache_hits(trace)[1] == records[0]["total"] // trace.block_size * trace.block_size > 0


@given(block_size=st.sampled_from([16, 48, 64, 512, 1024]), total=st.integers(1, 5000))
def test_blocks_are_named_as_a_trace_wants_them(block_size: int, total: int) -> None:
    hashes = [number.to_bytes(32, "big") for number in range(1 << 70, (1 << 70) + (total - 1) // block_size)]
    line = json.loads(line_of(LogEntry(record(total=total), 5.0, hashes, b"\xff" * 32, block_size)))
    size = line["block_tokens"]
    assert size % block_size == 0
    assert size <= max(512, block_size)
    assert len(line["hash_ids"]) == -(-total // size)  # as Mooncake's traces count them
    assert all(0 <= each < 1 << 53 for each in line["hash_ids"])


def test_the_oldest_files_go(tmp_path) -> None:
    old = [tmp_path / f"requests-2026010{day}T000000Z-1.jsonl" for day in range(1, 10)]
    for age, path in enumerate(old):
        path.write_bytes(b"x" * (1 << 17))
        os.utime(path, (age, age))
    (tmp_path / "notes.txt").write_bytes(b"y" * (1 << 21))
    log = RequestLog(RequestLogConfig(directory=tmp_path, max_bytes=1 << 20), lambda *_: None)
    kept = [path for path in old if path.exists()]
    log.close()
    assert kept == old[-(FILES - 1) :]
    assert (tmp_path / "notes.txt").exists()


def end(log: RequestLog) -> None:
    """A request is over."""
    log.ended(request_of("x", SERVED), record(total=7), 5.0)


def test_a_file_that_somebody_deletes_is_begun_again(tmp_path) -> None:
    log = RequestLog(RequestLogConfig(directory=tmp_path), lambda *_: None)
    (path,) = tmp_path.glob(PATTERN)
    path.unlink()
    end(log)
    log.close()
    (path,) = tmp_path.glob(PATTERN)
    assert len(path.read_text().splitlines()) == 1


@on_loop
async def test_a_directory_that_was_gone_for_a_while_is_written_to_again(tmp_path) -> None:
    directory, lost = tmp_path / "log", Counter[str]()
    log = RequestLog(
        RequestLogConfig(directory=directory), lambda reason, number: lost.update({reason: number}), interval_s=0.01
    )
    shutil.rmtree(directory)
    directory.write_text("in the way: no file can be opened there")
    end(log)
    await until(lambda: lost == {"disk": 1})
    directory.unlink()
    end(log)
    log.close()
    (path,) = directory.glob(PATTERN)
    assert len(path.read_text().splitlines()) == 1


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path) -> None:
    lost = Counter[str]()
    log = RequestLog(
        RequestLogConfig(directory=tmp_path),
        lambda reason, number: lost.update({reason: number}),
        new_file=lambda *_: FileIO("/dev/full", "ab"),
    )
    for _ in range(3):
        end(log)
    log.close()
    assert lost == {"disk": 3}


def test_two_containers_share_a_directory_and_no_file(tmp_path) -> None:
    began = time.gmtime(0.0)
    names = [name_of(PREFIX, began, host, 1) for host in ("one", "one", "another")]  # two of one host's name
    for name in names:
        new_file(tmp_path, name).close()
    assert len(list(tmp_path.glob(PATTERN))) == 3


def test_what_cannot_be_is_said(tmp_path) -> None:
    with pytest.raises(SettingsError, match="max_bytes"):
        RequestLogConfig(max_bytes=5)


@on_memory_loop
async def test_a_directory_that_cannot_be_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GatewayConfigError, match=r"request_log\.directory = .*file/log"):
        async with pipeline(request_log=RequestLogConfig(directory=tmp_path / "file" / "log")):
            pass
