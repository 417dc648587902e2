"""A double of the Kubernetes API, for tests: it keeps, lists and tells Pods, EndpointSlices and InferencePools as the real one.

One version counts all writes. A watch begins after the version that it names, and a list goes on at the version of its first
page; both get 410 once that is forgotten. A selector that an object no longer meets tells a watch that it is deleted.
"""

import asyncio
import base64
import json
import re
import ssl
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

COLLECTION: Final = re.compile(
    r"/(?P<api>api/v1|apis/discovery\.k8s\.io/v1|apis/inference\.networking\.k8s\.io/v1)"
    r"/namespaces/(?P<namespace>[^/]+)/(?P<resource>pods|endpointslices|inferencepools)"
    r"(?:/(?P<name>[^/]+)(?P<status>/status)?)?"
)
POOLS: Final = "inference.networking.k8s.io"
GROUPS: Final = {"pods": "", "endpointslices": "discovery.k8s.io", "inferencepools": POOLS}
KINDS: Final = {"pods": "Pod", "endpointslices": "EndpointSlice", "inferencepools": "InferencePool"}
VERSIONS: Final = {"pods": "v1", "endpointslices": "discovery.k8s.io/v1", "inferencepools": f"{POOLS}/v1"}
TERM: Final = re.compile(
    r"(?P<key>[^\s!=,]+)\s*(?:(?P<op>=|==|!=)\s*(?P<value>\S*)|(?P<set>in|notin)\s*\((?P<values>.*)\))"
)
GRACE_S: Final = 30  # of a Pod that has a machine; others are gone at once

Object = dict[str, Any]
Key = tuple[str, str, str]  # resource, namespace, name


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
            "reason": reason, "code": code,
        }  # fmt: skip
        self.code = code


@dataclass(frozen=True)
class Write:
    """`before` and `after` are None where there was, or is, no such object."""

    version: int
    key: Key
    before: Object | None
    after: Object | None


class ApiDouble:
    """Served on loopback by a thread of its own. `rights` are verbs and resources by token."""

    def __init__(self) -> None:
        self.rights: dict[str, set[tuple[str, str]]] = {}
        self.bookmark_s = 60.0
        self.is_hung = False
        self.tls: ssl.SSLContext | None = None
        self.requests: list[tuple[str, str, Mapping[str, str]]] = []
        self.port = 0
        self._version, self._floor = 1, 0
        self._objects: dict[Key, Object] = {}
        self._writes: list[Write] = []
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: threading.Event | None = None
        self._changed: asyncio.Condition
        self._stop: asyncio.Event

    @property
    def base(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        ready, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="api-double", daemon=True).start()
        assert ready.wait(10.0)

    def stop(self) -> None:
        """As by `kill -9`: connections are cut off; what is stored stays."""
        if self._loop is not None and self._ended is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            assert self._ended.wait(10.0)
            self._loop = None

    def forget(self) -> None:
        """What has changed so far is compacted, and no watch or list goes on from before."""
        with self._lock:
            self._floor, self._writes = self._version, []
        self._notify()

    def _notify(self) -> None:
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._wake(), self._loop)

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._changed, self._stop = asyncio.get_running_loop(), asyncio.Condition(), asyncio.Event()
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{rest:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self.tls)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._stop.wait()
        if runner.server is not None:
            for protocol in [*runner.server.connections]:
                if protocol.transport is not None:
                    protocol.transport.abort()
        await runner.cleanup()
        assert self._ended is not None
        self._ended.set()

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        self.requests.append((http.method, http.path, dict(http.query)))
        if self.is_hung:
            await self._stop.wait()
        try:
            return await self._called(http)
        except ApiError as error:
            return web.json_response(error.status, status=error.code)

    async def _called(self, http: web.Request) -> web.StreamResponse:
        found = COLLECTION.fullmatch(http.path)
        if found is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        resource, namespace, name = found["resource"], found["namespace"], found["name"]
        is_watch = http.query.get("watch") in ("1", "true")
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(http.method) or (
            "watch" if is_watch else "get" if name else "list"
        )
        self._authorize(http, verb, resource, namespace)
        if http.method == "GET" and not name:
            return await (self._watch if is_watch else self._list)(http, resource, namespace)
        key = (resource, namespace, name or "")
        body = await http.json() if http.can_read_body else {}
        with self._lock:
            made = self._write(http, verb, key, body, is_status=bool(found["status"]))
        self._notify()
        return web.json_response(made, status=201 if verb == "create" else 200)

    def _authorize(self, http: web.Request, verb: str, resource: str, namespace: str) -> None:
        scheme, _, token = http.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self.rights:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        if not {(verb, resource), ("*", "*")} & self.rights[token]:
            raise ApiError(
                403,
                "Forbidden",
                f'{resource} is forbidden: User "{token}" cannot {verb} resource "{resource}" in API group '
                f'"{GROUPS[resource]}" in the namespace "{namespace}"',
            )

    def _write(self, http: web.Request, verb: str, key: Key, body: Object, *, is_status: bool) -> Object:
        if verb == "create":
            return self._create(key, body)
        before = self._objects.get(key)
        if before is None:
            raise ApiError(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        if verb == "get":
            return before
        if verb == "delete":
            return self._delete(key, before, int(http.query.get("gracePeriodSeconds", GRACE_S)))
        meta = body.get("metadata") or {}
        if (wanted := meta.get("resourceVersion")) and wanted != before["metadata"]["resourceVersion"]:
            raise ApiError(
                409, "Conflict", f'Operation cannot be fulfilled on {key[0]} "{key[2]}": the object has been modified'
            )
        if is_status:
            after = {**before, "status": merged(before.get("status", {}), body.get("status", {}))}
        else:
            after = merged(before, body)
            if key[0] == "pods":
                after["status"] = before["status"]
        kept = ("uid", "creationTimestamp", "namespace", "name")
        after["metadata"] = {**after["metadata"], **{each: before["metadata"][each] for each in kept}}
        return self._store(key, before, after)

    def _create(self, key: Key, body: Object) -> Object:
        resource, namespace, _ = key
        name = body["metadata"]["name"]
        key = resource, namespace, name
        if key in self._objects:
            raise ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists')
        identity = {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        made = {**body, "kind": KINDS[resource], "apiVersion": VERSIONS[resource]}
        made["metadata"] = {**body["metadata"], **identity}
        if resource == "pods":
            made["status"] = {"phase": "Pending"}
        return self._store(key, None, made)

    def _delete(self, key: Key, before: Object, grace_s: int) -> Object:
        ends = {
            **before,
            "metadata": {**before["metadata"], "deletionTimestamp": _now(), "deletionGracePeriodSeconds": grace_s},
        }
        has_machine = key[0] == "pods" and before["spec"].get("nodeName")
        if grace_s and has_machine and before["status"]["phase"] not in ("Succeeded", "Failed"):
            return self._store(key, before, ends)
        return self._store(key, before, None, ends)

    def _store(self, key: Key, before: Object | None, after: Object | None, last: Object | None = None) -> Object:
        self._version += 1
        version = {"resourceVersion": str(self._version)}
        told = after or last
        assert told is not None
        told["metadata"] = {**told["metadata"], **version}
        if after is None:
            del self._objects[key]
        else:
            self._objects[key] = after
        self._writes.append(Write(self._version, key, before if after is not None else told, after))
        return told

    async def _list(self, http: web.Request, resource: str, namespace: str) -> web.StreamResponse:
        with self._lock:
            at, last = self._version, ""
            if token := http.query.get("continue"):
                at, last = json.loads(base64.b64decode(token))
                if at < self._floor:
                    raise ApiError(410, "Expired", "The provided continue parameter is too old")
            everything = [
                each
                for key, each in sorted(self._at(at).items())
                if key[:2] == (resource, namespace) and is_asked_for(each, http.query)
            ]
        rest = [each for each in everything if each["metadata"]["name"] > last]
        limit = int(http.query.get("limit") or 0) or len(rest) or 1
        meta: dict[str, Any] = {"resourceVersion": str(at)}
        if len(rest) > limit:
            goes_on = [at, rest[limit - 1]["metadata"]["name"]]
            meta |= {"continue": base64.b64encode(json.dumps(goes_on).encode()).decode()}
            meta |= {"remainingItemCount": len(rest) - limit}
        answer = {"kind": f"{KINDS[resource]}List", "apiVersion": VERSIONS[resource], "metadata": meta}
        return web.json_response({**answer, "items": rest[:limit]})

    def _at(self, version: int) -> Mapping[Key, Object]:
        """All objects as they were."""
        found: dict[Key, Object] = dict(self._objects)
        for write in reversed(self._writes):
            if write.version > version:
                if write.before is None:
                    found.pop(write.key, None)
                else:
                    found[write.key] = write.before
        return found

    async def _watch(self, http: web.Request, resource: str, namespace: str) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(http)
        seen = int(http.query["resourceVersion"])
        ends_at = time.monotonic() + float(http.query.get("timeoutSeconds", "1800"))
        marks_at = time.monotonic() + self.bookmark_s
        while (now := time.monotonic()) < ends_at:
            with self._lock:
                is_too_old, version = seen < self._floor, self._version
                writes = [write for write in self._writes if write.version > seen]
            if is_too_old:
                gone = ApiError(410, "Expired", f"too old resource version: {seen} ({self._floor})")
                await answer.write(_line("ERROR", gone.status))
                break
            for kind, told in _events(writes, (resource, namespace), http.query):
                await answer.write(_line(kind, told))
            seen = version
            if now >= marks_at and http.query.get("allowWatchBookmarks") == "true":
                marks_at = now + self.bookmark_s
                mark = {
                    "kind": KINDS[resource],
                    "apiVersion": VERSIONS[resource],
                    "metadata": {"resourceVersion": str(seen)},
                }
                await answer.write(_line("BOOKMARK", mark))
            try:
                async with asyncio.timeout(max(0.0, min(ends_at, marks_at) - now)), self._changed:
                    await self._changed.wait_for(lambda: self._version > seen or self._floor > seen)  # noqa: B023
            except TimeoutError:
                continue
        if self.is_hung:
            await self._stop.wait()
        return answer


def _events(writes: Sequence[Write], of: tuple[str, str], query: Mapping[str, str]) -> Iterator[tuple[str, Object]]:
    for write in writes:
        if write.key[:2] != of:
            continue
        was = write.before is not None and is_asked_for(write.before, query)
        is_ = write.after is not None and is_asked_for(write.after, query)
        version = {"resourceVersion": str(write.version)}
        if is_ and write.after is not None:
            yield ("MODIFIED" if was else "ADDED"), write.after
        elif was and (told := write.after or write.before) is not None:
            yield "DELETED", {**told, "metadata": {**told["metadata"], **version}}


def is_asked_for(each: Object, query: Mapping[str, str]) -> bool:
    """Whether labels, and the name, are as a list or a watch asks."""
    field, _, name = query.get("fieldSelector", "").partition("=")
    if field not in ("", "metadata.name"):
        raise ApiError(400, "BadRequest", f"field label not supported: {field}")
    return meets(each, query.get("labelSelector", "")) and (not field or each["metadata"]["name"] == name)


def meets(each: Object, selector: str) -> bool:
    """Whether labels are as a selector says."""
    labels = each["metadata"].get("labels") or {}
    for term in filter(None, (part.strip() for part in re.split(r",(?![^(]*\))", selector))):
        if (found := TERM.fullmatch(term)) is None:
            key = term.lstrip("!")
            holds = (key in labels) != term.startswith("!")
        elif found["set"]:
            values = {value.strip() for value in found["values"].split(",")}
            holds = (labels.get(found["key"]) in values) == (found["set"] == "in")
        else:
            holds = (labels.get(found["key"]) == found["value"]) == (found["op"] != "!=")
        if not holds:
            return False
    return True


def merged(old: Any, patch: Any) -> Any:
    """By RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


def _line(kind: str, told: Object) -> bytes:
    return json.dumps({"type": kind, "object": told}).encode() + b"\n"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
