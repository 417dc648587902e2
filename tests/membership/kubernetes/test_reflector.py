"""What a follower makes of answers that a healthy API server rarely gives."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from membership.errors import KubernetesFailed
from membership.kubernetes.client import ApiClient
from membership.kubernetes.objects import Pod
from membership.kubernetes.reflector import Collection, Reflector, ReflectorTimes
from membership.kubernetes.settings import KubernetesConfig

WITHIN_S = 60.0
CALL_S = 30.0
PATH = "/api/v1/namespaces/llm/pods"

Step = Callable[[web.Request], Awaitable[web.StreamResponse]]


def page(*names: str, version: str = "7", goes_on: str = "") -> Step:
    """A page of a list."""
    items = [{"metadata": {"name": name, "namespace": "llm", "uid": name}} for name in names]
    return text(json.dumps({"metadata": {"resourceVersion": version, "continue": goes_on}, "items": items}).encode())


def text(body: bytes, status: int = 200, **headers: str) -> Step:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers={key.replace("_", "-"): headers[key] for key in headers})

    return answer


def refusal(code: int, message: str = "no", **headers: str) -> Step:
    return text(json.dumps({"kind": "Status", "code": code, "message": message}).encode(), code, **headers)


def watch(*events: bytes, lasts_s: float = 0.0, is_cut: bool = False) -> Step:
    """A watch that tells these events, each in two parts, and ends or is cut off."""

    async def answer(http: web.Request) -> web.StreamResponse:
        said = web.StreamResponse()
        await said.prepare(http)
        for event in events:
            for part in (event[:5], event[5:] + b"\n"):
                await said.write(part)
                await asyncio.sleep(0.01)
        await asyncio.sleep(lasts_s)
        if is_cut and http.transport is not None:
            http.transport.abort()
        return said

    return answer


def event(kind: str, **told: object) -> bytes:
    return json.dumps({"type": kind, "object": told}).encode()


GONE = event("ERROR", code=410, reason="Expired", message="too old resource version")


class NoChance(np.random.Generator):
    """Takes nothing away from pauses, and counts them."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(1))
        self.pauses = 0

    def random(self, *_: object, **__: object) -> Any:
        self.pauses += 1
        return 0.0


@dataclass
class Api:
    """Answers lists and watches by the next step of each, and by the last one again and again."""

    lists: Sequence[Step]
    watches: Sequence[Step]
    token: str = "secret"
    rng: NoChance = field(default_factory=NoChance)
    asked: list[tuple[str, str, float]] = field(default_factory=list)
    pauses: list[int] = field(default_factory=list)  # up to each of these
    states: list[KubernetesFailed | None] = field(default_factory=list)
    listed: list[list[str]] = field(default_factory=list)

    async def answer(self, http: web.Request) -> web.StreamResponse:
        what, key = ("watch", "resourceVersion") if "watch" in http.query else ("list", "continue")
        steps = self.watches if what == "watch" else self.lists
        number = len(self.times(what))
        self.asked.append((what, http.query.get(key, ""), time.monotonic()))
        self.pauses.append(self.rng.pauses)
        return await steps[min(number, len(steps) - 1)](http)

    def times(self, what: str) -> list[float]:
        return [at for kind, _, at in self.asked if kind == what]

    @property
    def failures(self) -> list[KubernetesFailed]:
        return [state for state in self.states if state is not None]

    def follow(self, folder: Path, ends: Callable[[], bool], at_least_s: float = 0.0) -> None:
        """Until `ends`, but no shorter than that."""
        (folder / "token").write_text(self.token)
        asyncio.run(self._follow(folder, ends, at_least_s))

    async def _follow(self, folder: Path, ends: Callable[[], bool], at_least_s: float) -> None:
        app = web.Application()
        app.router.add_get(PATH, self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = ApiClient(KubernetesConfig(selector="a", server=server, token_file=folder / "token"), CALL_S)
        collection = Collection(
            path=PATH, selector="a", kind=Pod, put=lambda _: None, deleted=lambda _: None,
            listed=lambda pods: self.listed.append([pod.metadata.name for pod in pods]),
        )  # fmt: skip
        times = ReflectorTimes(call_s=CALL_S)
        reflector = Reflector(client, collection, self.states.append, time.monotonic, self.rng, times)
        following = asyncio.create_task(reflector.run())
        try:
            await asyncio.sleep(at_least_s)
            async with asyncio.timeout(WITHIN_S):
                while not ends():
                    assert not following.done(), following.exception()
                    await asyncio.sleep(0.01)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await client.close()
            await runner.cleanup()


QUIET = watch(lasts_s=30.0)


def test_a_server_that_cuts_every_watch_is_not_asked_in_a_loop(tmp_path: Path) -> None:
    api = Api([page("a")], [watch(is_cut=True)])
    api.follow(tmp_path, lambda: len(api.times("watch")) >= 3, at_least_s=1.0)
    assert len(api.times("watch")) < 8


def test_a_list_that_the_server_cannot_give_is_told(tmp_path: Path) -> None:
    api = Api([page("a"), refusal(504, "Too large resource version")], [watch(GONE)])
    api.follow(tmp_path, lambda: bool(api.failures))
    assert api.failures[0].reason == "late"
    assert "list pods in namespace llm" in str(api.failures[0])
    assert "Too large resource version" in str(api.failures[0])


def test_a_list_that_expires_between_pages_is_read_anew_as_a_whole(tmp_path: Path) -> None:
    api = Api([page("a", goes_on="t1"), refusal(410), page("a", goes_on="t2"), page("b", version="9")], [QUIET])
    api.follow(tmp_path, lambda: bool(api.listed) and api.states[-1:] == [None])
    assert api.listed == [["a", "b"]]
    assert [asked[:2] for asked in api.asked] == [
        ("list", ""), ("list", "t1"), ("list", ""), ("list", "t2"), ("watch", "9"),
    ]  # fmt: skip


@pytest.mark.parametrize("gone", [watch(GONE), refusal(410)], ids=["event", "status"])
def test_after_an_outage_what_was_forgotten_is_read_anew_at_once(tmp_path: Path, gone: Step) -> None:
    api = Api([page("a"), page("b", version="9")], [watch(lasts_s=1.1), *[refusal(503)] * 3, gone, QUIET])
    api.follow(tmp_path, lambda: len(api.listed) == 2)
    (second,) = [number for number, (what, *_) in enumerate(api.asked) if what == "list" and number]
    assert api.asked[second - 1][0] == "watch"
    assert api.pauses[second] == api.pauses[second - 1] == 3


def test_a_server_that_forgets_at_once_is_not_asked_in_a_loop(tmp_path: Path) -> None:
    api = Api([page("a")], [refusal(410)])
    api.follow(tmp_path, lambda: len(api.listed) >= 3, at_least_s=1.0)
    assert len(api.listed) < 8


def test_a_busy_server_is_asked_again_when_it_says(tmp_path: Path) -> None:
    api = Api([refusal(429, retry_after="1"), page("a")], [QUIET])
    api.follow(tmp_path, lambda: bool(api.listed))
    first, second = api.times("list")
    assert second - first >= 1.0
    assert api.failures[0].reason == "busy"


@pytest.mark.parametrize("said", ["", "-3", "nan", "Wed, 21 Oct 2037 07:28:00 GMT", "1e9"])
def test_a_time_to_wait_that_makes_no_sense_is_not_believed(tmp_path: Path, said: str) -> None:
    api = Api([refusal(429, retry_after=said), page("a")], [QUIET])
    api.follow(tmp_path, lambda: bool(api.listed))


def test_a_server_in_trouble_is_not_asked_for_lists_besides(tmp_path: Path) -> None:
    api = Api([page("a")], [watch(lasts_s=1.1), refusal(503), QUIET])
    api.follow(tmp_path, lambda: api.states == [None, api.failures[-1] if api.failures else None, None])
    assert api.failures[0].reason == "unreachable"
    assert len(api.listed) == 1


def test_pauses_are_short_again_after_a_quiet_watch(tmp_path: Path) -> None:
    api = Api([page("a")], [*[refusal(503)] * 3, watch(lasts_s=1.1), refusal(503), QUIET])
    api.follow(tmp_path, lambda: len(api.times("watch")) == 6)
    assert api.times("watch")[5] - api.times("watch")[4] < 1.9  # a quarter of a second; the fourth of a row is two


@pytest.mark.parametrize(
    "body",
    [b"<html>", b'{"metadata": {"resourceVersion": "\xff"}, "items": []}', b'{"metadata": {"resourceVersion": ""}}',
     b'{"metadata": {"resourceVersion": "0"}}', b'{"metadata": {}, "items": [{"metadata": {}}]}', b"[" * 100_000],
)  # fmt: skip
def test_a_list_that_makes_no_sense_is_named(tmp_path: Path, body: bytes) -> None:
    api = Api([text(body)], [QUIET])
    api.follow(tmp_path, lambda: bool(api.failures))
    assert api.failures[0].reason == "malformed"
    assert "pods in namespace llm" in str(api.failures[0])
    assert not api.listed


@pytest.mark.parametrize("line", [b"half", b'{"type": "\xff", "object": {}}', event("ADDED", metadata={})])
def test_an_event_that_makes_no_sense_is_named_and_all_is_read_anew(tmp_path: Path, line: bytes) -> None:
    api = Api([page("a")], [watch(line, lasts_s=5.0), QUIET])
    api.follow(tmp_path, lambda: len(api.listed) == 2 and api.states[-1] is None)
    assert api.failures[0].reason == "malformed"
    assert "pods in namespace llm" in str(api.failures[0])


def test_a_refusal_in_no_words_is_one_all_the_same(tmp_path: Path) -> None:
    api = Api([text(b'{"message": "\xff"}', 403)], [QUIET])
    api.follow(tmp_path, lambda: bool(api.failures))
    assert api.failures[0].reason == "denied"


def test_a_list_that_never_ends_is_told(tmp_path: Path) -> None:
    api = Api([page(goes_on="more")], [QUIET])
    api.follow(tmp_path, lambda: bool(api.failures))
    assert api.failures[0].reason == "too_many"


@pytest.mark.parametrize("token", ["one\ntwo", "a\rb", "a b", "\xe4", " "])
def test_a_token_that_is_none_is_named_by_its_file(tmp_path: Path, token: str) -> None:
    api = Api([page("a")], [QUIET], token=token)
    api.follow(tmp_path, lambda: bool(api.failures))
    assert api.failures[0].reason == "unreadable"
    assert str(tmp_path / "token") in str(api.failures[0])
    assert "must be one word" in str(api.failures[0])
