"""Where contract tests find an API server: the double, or a real kube-apiserver over an etcd, in processes of their own."""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import pytest

from membership.kubernetes.settings import KubernetesConfig
from tests.membership.etcd.servers import RealEtcd, etcd_binary
from tests.membership.kubernetes.double import ApiDouble
from tests.transport.path.ports import free_port

BINARY: Final = "KUBE_APISERVER"
START_S: Final = 90.0
ADMIN: Final = "admin"
SELECTOR: Final = "app=prfaas"
NAMESPACE: Final = "llm"
READ: Final = frozenset((verb, resource) for verb in ("list", "watch") for resource in ("pods", "endpointslices"))
READ_POOLS: Final = READ | {(verb, "inferencepools") for verb in ("list", "watch")}
GROUPS: Final = {"pods": "", "endpointslices": "discovery.k8s.io"}


class ApiUnderTest(Protocol):
    """What contract tests do to an API server, beside calling it."""

    @property
    def base(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def authority(self) -> Path | None: ...

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def forget(self) -> None:
        """No watch goes on from before."""
        ...

    def allow(self, token: str, rights: frozenset[tuple[str, str]]) -> None: ...

    def close(self) -> None: ...


class DoubledApi:
    authority = None

    def __init__(self) -> None:
        self.double = ApiDouble()
        self.double.rights[ADMIN] = {("*", "*")}
        self.start, self.kill, self.forget, self.close = (
            self.double.start, self.double.stop, self.double.forget, self.double.stop,
        )  # fmt: skip

    @property
    def base(self) -> str:
        return self.double.base

    @property
    def port(self) -> int:
        return self.double.port

    def allow(self, token: str, rights: frozenset[tuple[str, str]]) -> None:
        self.double.rights[token] = {*rights}


class RealApi:
    """kube-apiserver with RBAC and users by tokens; no kubelet, and no admission that would ask for accounts."""

    def __init__(self, folder: Path, binary: str, etcd: str) -> None:
        self.port = free_port()
        self._folder, self._binary = folder, binary
        self._etcd = RealEtcd(folder, etcd)
        self._process: subprocess.Popen[bytes] | None = None
        self._tokens = {ADMIN: "system:masters"}
        self._key = folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(self._key), "2048"], check=True, capture_output=True)

    @property
    def base(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def authority(self) -> Path:
        return self._folder / "certs" / "apiserver.crt"

    def start(self) -> None:
        if self._process is None:
            self._etcd.start()
        self._run()
        with contextlib.suppress(urllib.error.HTTPError):
            call(self, "POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def forget(self) -> None:
        self._etcd.compact()
        self.kill()
        self._run()

    def allow(self, token: str, rights: frozenset[tuple[str, str]]) -> None:
        """Users of the file of tokens are known after a start."""
        if token not in self._tokens:
            self._tokens[token] = ""
            self.kill()
            self._run()
        rules = [
            {"apiGroups": [GROUPS[resource]], "resources": [resource], "verbs": [verb]}
            for verb, resource in sorted(rights)
        ]
        at, meta = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}", {"metadata": {"name": token}}
        with contextlib.suppress(urllib.error.HTTPError):
            call(self, "DELETE", f"{at}/roles/{token}")
        call(self, "POST", f"{at}/roles", {**meta, "rules": rules})
        subject = {"kind": "User", "name": token, "apiGroup": "rbac.authorization.k8s.io"}
        role = {"kind": "Role", "name": token, "apiGroup": "rbac.authorization.k8s.io"}
        with contextlib.suppress(urllib.error.HTTPError):
            call(self, "POST", f"{at}/rolebindings", {**meta, "subjects": [subject], "roleRef": role})

    def close(self) -> None:
        self.kill()
        self._etcd.close()

    def _run(self) -> None:
        tokens = self._folder / "tokens.csv"
        tokens.write_text("".join(f'{token},{token},{token},"{group}"\n' for token, group in self._tokens.items()))
        with (self._folder / "apiserver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, "--etcd-servers", self._etcd.inner, "--bind-address", "127.0.0.1",
                 "--secure-port", str(self.port), "--cert-dir", str(self._folder / "certs"),
                 "--token-auth-file", str(tokens), "--authorization-mode", "RBAC", "--service-cluster-ip-range",
                 "10.96.0.0/24", "--service-account-issuer", "https://tests", "--service-account-key-file",
                 str(self._key), "--service-account-signing-key-file", str(self._key),
                 "--disable-admission-plugins", "ServiceAccount"],
                stdout=log, stderr=log,
            )  # fmt: skip
        until = time.monotonic() + START_S
        while not self._is_ready():
            assert time.monotonic() < until, (self._folder / "apiserver.log").read_text()[-2000:]
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            call(self, "GET", "/readyz")
        except (OSError, ssl.SSLError):
            return False
        return True


def needed_server(folder: Path) -> RealApi:
    """Skips the test without a binary."""
    binary, etcd = os.environ.get(BINARY), etcd_binary()
    if binary is None:
        pytest.skip(f"no kube-apiserver: {BINARY} names one")
    if etcd is None or shutil.which("openssl") is None:
        pytest.skip("a kube-apiserver needs an etcd (ETCD_BINARY) and openssl")
    return RealApi(folder, binary, etcd)


def call(api: ApiUnderTest, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
    """Asks as an administrator."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {ADMIN}", "content-type": kind}
    request = urllib.request.Request(api.base + path, data, headers, method=method)
    context = None
    if api.authority is not None:
        context = ssl.create_default_context(cafile=str(api.authority))
    with urllib.request.urlopen(request, timeout=10.0, context=context) as answer:
        said = answer.read()
    return json.loads(said) if said.startswith(b"{") else None


NO_LABELS: Final[Mapping[str, str]] = {}


class Cluster:
    """Pods and EndpointSlices, as controllers and kubelets would write them."""

    def __init__(self, api: ApiUnderTest, namespace: str = NAMESPACE) -> None:
        self._api = api
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._pools = f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"

    def add(
        self, name: str, address: str = "127.0.0.1", port: int = 7001, labels: Mapping[str, str] = NO_LABELS
    ) -> None:
        """A Pod that runs; it has its address a moment later, as kubelets give it."""
        self.create(name, port, labels)
        self.status(name, phase="Running", podIP=address, podIPs=[{"ip": address}])

    def create(self, name: str, port: int = 7001, labels: Mapping[str, str] = NO_LABELS) -> None:
        container = {"name": "node", "image": "prfaas", "ports": [{"name": "control", "containerPort": port}]}
        self._call("POST", self._pods, {
            "metadata": {"name": name, "labels": {"app": "prfaas", "prfaas/role": "decode", **labels}},
            "spec": {"nodeName": "m1", "containers": [container]},
        })  # fmt: skip

    def status(self, name: str, **status: object) -> None:
        self._call("PATCH", f"{self._pods}/{name}/status", {"status": status})

    def ready(self, name: str, is_ready: bool) -> None:
        self.status(name, conditions=[{"type": "Ready", "status": str(is_ready)}])

    def label(self, name: str, **labels: str | None) -> None:
        self._call("PATCH", f"{self._pods}/{name}", {"metadata": {"labels": labels}})

    def annotate(self, name: str, annotations: Mapping[str, str | None]) -> None:
        self._call("PATCH", f"{self._pods}/{name}", {"metadata": {"annotations": annotations}})

    def end(self, name: str) -> None:
        """It is told to end, and has its time for that."""
        self._call("DELETE", f"{self._pods}/{name}")

    def gone(self, name: str) -> None:
        self._call("DELETE", f"{self._pods}/{name}?gracePeriodSeconds=0")

    def serve(self, service: str, name: str, serving: bool, **more: bool) -> None:
        """The slice of a service has one Pod."""
        pod = self._call("GET", f"{self._pods}/{name}")
        ref = {"kind": "Pod", "name": name, "uid": pod["metadata"]["uid"]}
        endpoint = {
            "addresses": ["10.0.0.1"],
            "targetRef": ref,
            "conditions": {"ready": True, "serving": serving, **more},
        }
        body = {"addressType": "IPv4", "endpoints": [endpoint],
                "metadata": {"name": f"{service}-{name}", "labels": {"kubernetes.io/service-name": service}}}  # fmt: skip
        try:
            self._call("POST", self._slices, body)
        except urllib.error.HTTPError:
            self._call("PATCH", f"{self._slices}/{service}-{name}", body)

    def pool(self, name: str, *ports: int, **labels: str) -> None:
        """An InferencePool is there, or is another now."""
        target_ports = [{"number": port} for port in ports]
        spec = {"selector": {"matchLabels": labels}, "targetPorts": target_ports}
        with contextlib.suppress(urllib.error.HTTPError):
            self._call("DELETE", f"{self._pools}/{name}")
        self._call("POST", self._pools, {"metadata": {"name": name}, "spec": spec})

    def retarget(self, name: str, *ports: int) -> None:
        self._call("PATCH", f"{self._pools}/{name}", {"spec": {"targetPorts": [{"number": port} for port in ports]}})

    def drop_pool(self, name: str) -> None:
        self._call("DELETE", f"{self._pools}/{name}")

    def _call(self, method: str, path: str, body: object = None) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        return call(self._api, method, path, body, kind)


def config(api: ApiUnderTest, folder: Path, **more: Any) -> KubernetesConfig:
    """The settings of a gateway; its token is in a file."""
    token = folder / "token"
    if not token.exists():
        token.write_text("gateway\n")
    settings = {"selector": SELECTOR, "namespaces": (NAMESPACE,), "server": api.base, "token_file": token, **more}
    if api.authority is not None:
        settings["authority"] = api.authority
    return KubernetesConfig(**settings)


@contextlib.contextmanager
def relayed(port: int) -> Iterator["Relay"]:
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.cut()


class Relay:
    """A way to a port of this machine that can be cut, as a network is."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.port = free_port()
        self._lock = threading.Lock()
        self._held: list[socket.socket] = []
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Connections end, and new ones are refused."""
        with self._lock:
            for each in (self._listener, *self._held):
                _end(each)
                each.close()
            self._held.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                self._relay(listener, near)

    def _relay(self, listener: socket.socket, near: socket.socket) -> None:
        """What `cut` does not know of by then has been cut with the rest."""
        try:
            far = socket.create_connection(("127.0.0.1", self._to))
        except OSError:
            near.close()
            return
        with self._lock:
            if listener.fileno() < 0:
                near.close()
                far.close()
                return
            self._held += (near, far)
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while part := source.recv(1 << 16):
            sink.sendall(part)
    _end(source)
    _end(sink)


def _end(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
