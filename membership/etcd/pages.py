"""All keys below the root of an etcd, page by page at one revision, within bounds of number, length and time."""

import time
from collections.abc import Iterator
from typing import Final

from membership.errors import EtcdFailed, SourceFailed
from membership.etcd.client import EtcdClient
from membership.etcd.listing import MAX_VALUE_BYTES, Snapshot, StoredKey
from membership.sources import MAX_ENTRIES
from transport.control.proto.etcd_pb2 import EtcdKeyValue, RangeResponse

PAGE_KEYS: Final = 512
MAX_KEY_BYTES: Final = 1024  # longer ones name no node
BEGIN_S: Final = 4.5  # to read everything; a registry counts as lost after LATE_S of MembershipWatch


def read_all(client: EtcdClient, root: str, until: float) -> Snapshot:
    """Everything at the revision of the first page; `until` is a time of `time.monotonic`. Raises SourceFailed."""
    keys: list[StoredKey] = []
    revision = cluster = 0
    for page in pages(client, root, until):
        revision = revision or page.header.revision
        cluster = cluster or page.header.cluster_id
        if page.header.cluster_id != cluster:
            raise EtcdFailed("unreachable", f"{client.where}: these are endpoints of more than one etcd")
        if page.count > MAX_ENTRIES:
            raise too_many(client, root)
        keys += (stored(kv, root) for kv in page.kvs)
    return Snapshot(keys=keys, revision=revision, cluster=cluster)


def too_many(client: EtcdClient, root: str) -> SourceFailed:
    """More keys than a gateway takes."""
    return SourceFailed("too_many", f"{client.where}: {root}: more than {MAX_ENTRIES} nodes")


def pages(client: EtcdClient, root: str, until: float) -> Iterator[RangeResponse]:
    """A page that is too long is asked for again in smaller ones."""
    begin, end = key_range(root)
    revision, limit = 0, PAGE_KEYS
    while True:
        if time.monotonic() > until:
            raise EtcdFailed("late", f"{client.where}: it does not list all keys within {BEGIN_S:g} s")
        try:
            page = client.range(begin, end, limit=limit, revision=revision)
        except EtcdFailed as failure:
            if failure.reason != "too_long" or limit == 1:
                raise
            limit = max(1, limit // 64)
            continue
        yield page
        limit = min(PAGE_KEYS, limit * 2)
        if not page.more or not page.kvs:
            return
        revision = revision or page.header.revision
        begin = page.kvs[-1].key + b"\0"


def key_range(root: str) -> tuple[bytes, bytes]:
    """All keys that begin with the root, which ends with a slash."""
    begin = root.encode()
    return begin, begin[:-1] + b"0"


def stored(kv: EtcdKeyValue, root: str) -> StoredKey:
    """A key below the root."""
    value = kv.value if len(kv.value) <= MAX_VALUE_BYTES else None
    return StoredKey(name=name_of(kv, root), value=value, is_leased=kv.lease != 0)


def name_of(kv: EtcdKeyValue, root: str) -> str:
    """What comes after the root; bytes that are no UTF-8 are shown as numbers."""
    start = len(root.encode())
    return kv.key[start : start + MAX_KEY_BYTES].decode(errors="backslashreplace")
