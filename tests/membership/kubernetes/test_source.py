"""How an API server is followed: what is asked of it, within which bounds, and what ends with the source."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from membership.errors import KubernetesFailed
from membership.kubernetes.client import KEEPALIVE
from membership.kubernetes.reflector import ReflectorTimes
from membership.kubernetes.settings import ACCOUNT
from membership.kubernetes.source import KubernetesSource
from tests.membership.etcd.servers import until
from tests.membership.kubernetes.servers import NAMESPACE, READ, Cluster, DoubledApi, config
from transport.control.certificates import Authority

Follow = Callable[..., KubernetesSource]
TCP_TABLE: Final = Path("/proc/net/tcp")


@pytest.fixture
def api() -> Iterator[DoubledApi]:
    server = DoubledApi()
    server.start()
    server.allow("gateway", READ)
    yield server
    server.close()


@pytest.fixture
def follow(api: DoubledApi, tmp_path: Path) -> Iterator[Follow]:
    made: list[KubernetesSource] = []

    def source(times: ReflectorTimes | None = None, begin_s: float = 4.5, **more: Any) -> KubernetesSource:
        made.append(
            KubernetesSource(
                config(api, tmp_path, **more),
                rng=np.random.default_rng(1),
                begin_s=begin_s,
                times=times or ReflectorTimes(),
            )
        )
        return made[-1]

    yield source
    for each in made:
        each.close()


def ids(source: KubernetesSource) -> set[str]:
    reading = source.look()
    assert reading is not None
    return {member.id for member in reading.members}


def asked(api: DoubledApi, *, watch: bool) -> list[str]:
    """The versions that watches began at, or tokens of pages."""
    key = "resourceVersion" if watch else "continue"
    return [
        query.get(key, "")
        for _, path, query in api.double.requests
        if path.endswith(f"{NAMESPACE}/pods") and ("watch" in query) == watch
    ]


def test_a_look_says_what_is_new(api: DoubledApi, follow: Follow) -> None:
    Cluster(api).add("a")
    source = follow()
    assert ids(source) == {"a"}
    assert source.look() is None


def test_a_watch_that_ends_goes_on_where_bookmarks_say(api: DoubledApi, follow: Follow) -> None:
    api.double.bookmark_s = 0.2
    source = follow(ReflectorTimes(watch_s=(1.0, 1.0)))
    assert ids(source) == set()
    Cluster(api, "elsewhere").add("stranger")  # which counts the version up
    api.double.requests.clear()
    until(lambda: len(asked(api, watch=True)) >= 2)
    assert source.look() is None
    assert asked(api, watch=True)[-1] == "3"
    assert not asked(api, watch=False)


def test_all_is_read_anew_every_so_often(api: DoubledApi, follow: Follow) -> None:
    source = follow(ReflectorTimes(watch_s=(1.0, 1.0), relist_s=0.5))
    source.look()
    until(lambda: len(asked(api, watch=False)) >= 2)


def test_an_api_server_that_hangs_is_late(api: DoubledApi, follow: Follow) -> None:
    Cluster(api).add("a")
    source = follow(ReflectorTimes(watch_s=(1.0, 1.0), late_s=0.3, call_s=0.3))
    until(lambda: said(source) == {"a"})
    api.double.is_hung = True
    until(lambda: said(source) is None)
    with pytest.raises(KubernetesFailed, match="it does not answer: watch pods in namespace llm") as failed:
        source.look()
    assert failed.value.reason == "late"


def test_several_namespaces_are_one_registry(api: DoubledApi, follow: Follow) -> None:
    for name, namespace in (("a", "one"), ("b", "two"), ("c", "three")):
        Cluster(api, namespace).add(name, f"10.0.0.{ord(name)}")
    assert ids(follow(namespaces=("one", "two"))) == {"a", "b"}


def test_without_a_name_the_namespace_is_our_own(api: DoubledApi, follow: Follow, tmp_path: Path) -> None:
    Cluster(api).add("a")
    (tmp_path / "namespace").write_text(f"{NAMESPACE}\n")
    assert ids(follow(namespaces=())) == {"a"}


def test_where_our_own_namespace_is_unknown_that_is_said(follow: Follow) -> None:
    with pytest.raises(KubernetesFailed, match="namespaces are not named") as failed:
        follow(namespaces=()).look()
    assert failed.value.reason == "unreadable"


def test_pages_that_are_too_long_are_asked_for_in_parts(api: DoubledApi, follow: Follow) -> None:
    cluster = Cluster(api)
    for number in range(20):
        cluster.add(f"n{number}", f"10.0.0.{number + 1}")
        cluster.annotate(f"n{number}", {"long": "x" * 1_000_000})
    assert len(ids(follow(begin_s=30.0))) == 20
    assert len(asked(api, watch=False)) > 3


def test_an_object_that_is_too_long_is_named_as_such_and_the_view_is_back_without_it(
    api: DoubledApi, follow: Follow
) -> None:
    cluster = Cluster(api)
    cluster.add("a")
    source = follow()
    assert ids(source) == {"a"}
    cluster.annotate("a", {"long": "x" * 5_000_000})

    def reason() -> str:
        try:
            source.look()
        except KubernetesFailed as failure:
            return failure.reason
        return ""

    until(lambda: reason() == "too_long")
    until(lambda: reason() == "")  # a list may have it


def test_an_api_server_that_says_nothing_is_late(follow: Follow) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = follow(begin_s=0.3, server=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(KubernetesFailed, match=r"not all Pods were listed in 0.3 s") as failed:
            source.look()
        assert failed.value.reason == "late"


def test_a_server_in_clear_is_not_shown_the_kubelets_token(api: DoubledApi, follow: Follow) -> None:
    source = follow(token_file=ACCOUNT / "token")  # which is not there: as with kubectl proxy, whose token counts
    with pytest.raises(KubernetesFailed, match=r"\(401\): Unauthorized: name token_file"):
        source.look()


@pytest.mark.skipif(not TCP_TABLE.exists(), reason="no table of connections")
def test_a_way_that_is_cut_is_seen_within_ten_seconds_by_keepalives(api: DoubledApi, follow: Follow) -> None:
    follow().look()
    ours = [line.split() for line in TCP_TABLE.read_text().splitlines() if f":{api.port:04X} 01 " in line]
    ((kind, _, left),) = [each[5].partition(":") for each in ours]
    idle_s, interval_s, tries = (value for _, value in KEEPALIVE)
    assert (kind, int(left, 16) / 100 <= idle_s) == ("02", True)  # its timer is one of keepalives
    assert idle_s + interval_s * tries <= 10


def test_an_authority_that_is_not_there_is_named(api: DoubledApi, follow: Follow, tmp_path: Path) -> None:
    source = follow(server=f"https://127.0.0.1:{api.port}", authority=tmp_path / "none.crt")
    with pytest.raises(KubernetesFailed, match=r"authority .*none\.crt: ") as failed:
        source.look()
    assert failed.value.reason == "unreadable"


def test_over_tls_the_authority_is_what_its_file_says_now(api: DoubledApi, follow: Follow, tmp_path: Path) -> None:
    Cluster(api).add("a")
    issued = Authority(tmp_path / "ours").issue("api", ["127.0.0.1"])
    stranger = Authority(tmp_path / "theirs", "theirs").issue("api", ["127.0.0.1"])
    api.kill()
    api.double.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    api.double.tls.load_cert_chain(issued.certificate, issued.key)
    api.start()
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes(stranger.authority.read_bytes())
    source = follow(authority=trusted)
    with pytest.raises(KubernetesFailed, match="its certificate is not good") as failed:
        source.look()
    assert failed.value.reason == "unreachable"
    trusted.write_bytes(issued.authority.read_bytes())
    until(lambda: said(source) == {"a"})


def said(source: KubernetesSource) -> set[str] | None:
    """None while the API server cannot be asked."""
    try:
        reading = source.look()
    except KubernetesFailed:
        return None
    return {member.id for member in reading.members} if reading is not None else set()


def test_a_source_that_is_closed_ends_its_thread(api: DoubledApi, follow: Follow) -> None:
    before = threading.active_count()
    source = follow()
    source.look()
    source.close()
    until(lambda: threading.active_count() <= before)
    with pytest.raises(KubernetesFailed, match="no longer asked"):
        source.look()


def test_closing_wakes_a_look_that_waits(follow: Follow, api: DoubledApi) -> None:
    source = follow(begin_s=60.0, server="http://127.0.0.1:1")
    failures: list[str] = []

    def look() -> None:
        try:
            source.look()
        except KubernetesFailed as failure:
            failures.append(failure.reason)

    waiting = threading.Thread(target=look)
    waiting.start()
    time.sleep(0.05)
    source.close()
    waiting.join(60.0)
    assert failures == ["unreachable"]
