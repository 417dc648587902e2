"""What clients and operators do between two sites, with words that are known afterwards."""

import base64
import http.client
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from engine.byte_tokenizer import byte_tokenizer
from engine.emulated.emulated import EmulatedSequence
from hybrid_cache.hashing.block_hash import block_hashes
from tests.borders.capture import Flow
from tests.borders.network import run
from tests.borders.secrets import PROTOCOL, Secrets
from tests.borders.sites import (
    ADDRESSES,
    API_PORT,
    AWAY,
    BLOCK_SIZE,
    CLIENT,
    FIRST,
    GATEWAY,
    NODES,
    TENANT,
    Sites,
)
from transport.control.python_command import python_module

TIMEOUT_S: Final = 60.0
SHORT, LONG = 100, 700  # bytes of a prompt, each of them a token: below and above the threshold
STREAMED: Final = 100  # tokens of a stream in whose middle a node is killed
KILL_AFTER: Final = 10
SECRET: Final = re.compile(rb'"secret":"([A-Za-z0-9+/_=-]+)"')
SALT: Final = re.compile(rb'"salt":"([0-9a-f]{64})"')
PLAIN: Final = re.compile(r"[A-Za-z ]{12,}")
NAMESPACE: Final = re.compile(rb'"cache_salt":"(prfaas-[0-9a-f]{64})"')
CLIENT_SALT: Final = "salt-of-the-heron-ward"
CLASS_HEADER: Final = "x-prfaas-class"
BULK: Final = 4  # requests at once, of the class that waits for all others
PNG: Final = b"\x89PNG\r\n\x1a\n"
PIXELS: Final = b"XRAY-OF-THE-HERON-WARD" * 40  # of an image; no other byte of all that is sent is like them


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client was told."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def texts(self) -> list[str]:
        return [choice["message"]["content"] for choice in json.loads(self.body)["choices"]]


def prompt(subject: str, length: int) -> str:
    """A text that no other prompt begins as."""
    line = f"PATIENT-FILE {subject}: a confidential finding. "
    return (line * (length // len(line) + 1))[:length]


class Traffic:
    """Asks, and notes what must stay secret."""

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self.secrets = Secrets()
        files = sites.files
        self.secrets.add("protocol", *PROTOCOL)
        self.secrets.add("key", files.tenant_key, files.operator_key, files.prometheus_key, files.plan_token)
        self.secrets.add("tenant", TENANT)
        self.secrets.add("salt", CLIENT_SALT)
        self._authority = None if files.is_plain else files.folder / "certificates" / "authority.pem"
        self._trust = None if self._authority is None else ssl.create_default_context(cafile=self._authority)

    # Requests

    def chat(self, subject: str, length: int, max_tokens: int = 24, **options: Any) -> Answer:
        """A whole answer."""
        answer = self._asked(self._body(subject, length, max_tokens, options), lambda said: said.read())
        assert answer.status == 200, answer.body
        self._note_answers(*answer.texts)
        return answer

    def stream(
        self, subject: str, length: int, max_tokens: int = 24, meanwhile: Callable[[int], None] = lambda number: None
    ) -> str:
        """The text of a streamed answer; `meanwhile` is called with the number of each event."""

        def read(said: http.client.HTTPResponse) -> bytes:
            whole = b""
            for number, event in enumerate(line for line in said if line.startswith(b"data: {")):
                whole += event
                meanwhile(number)
            return whole

        answer = self._asked(self._body(subject, length, max_tokens, {"stream": True}), read)
        assert answer.status == 200, answer.body
        events = [json.loads(line.removeprefix(b"data: ")) for line in answer.body.splitlines()]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
        self._note_answers(text)
        return text

    def image(self, subject: str) -> Answer:
        """A question about an image, which the gateway has read when it says that the model takes none."""
        self.secrets.add("image", PIXELS[:22])
        url = "data:image/png;base64," + base64.b64encode(PNG + PIXELS).decode()
        body = self._body(subject, SHORT, 24, {})
        text = {"type": "text", "text": body["messages"][0]["content"]}
        content = [text, {"type": "image_url", "image_url": {"url": url}}]
        body["messages"] = [{"role": "user", "content": content}]
        return self._asked(body, lambda said: said.read())

    def bulk(self) -> list[Answer]:
        """Requests that go over the border, all at once, in the class of least priority."""
        subjects = [f"bulk number {number}" for number in range(BULK)]
        self.secrets.add("bulk", *(f"PATIENT-FILE {subject}:" for subject in subjects))
        bodies = [self._body(subject, LONG, 24, {}) for subject in subjects]
        with ThreadPoolExecutor(BULK) as pool:
            answers = list(
                pool.map(lambda body: self._asked(body, lambda said: said.read(), {CLASS_HEADER: "bulk"}), bodies)
            )
        for answer in answers:
            assert answer.status == 200, answer.body
            self._note_answers(*answer.texts)
        return answers

    def _note_answers(self, *texts: str) -> None:
        """Whole, and in the parts that are written alike everywhere."""
        self.secrets.add("answer", *texts, *(part for text in texts for part in PLAIN.findall(text)))

    def _body(self, subject: str, length: int, max_tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
        text = prompt(subject, length)
        self.secrets.add("prompt", f"PATIENT-FILE {subject}")
        messages = [{"role": "user", "content": text}]
        known = {"model": "model", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return known | dict(options)

    def _asked(
        self,
        body: Mapping[str, Any],
        read: Callable[[http.client.HTTPResponse], bytes],
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> Answer:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.sites.files.tenant_key}", **more}

        def ask() -> Answer:
            with closing(self._connection(GATEWAY, API_PORT)) as connection:
                connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                said = connection.getresponse()
                return Answer(said.status, dict(said.headers), read(said))

        return self.sites.machine(CLIENT).inside(ask)

    def scrape(self, name: str, port: int) -> str:
        """The metrics of a process, as Prometheus reads them, from the client's machine."""

        def ask() -> str:
            with closing(self._connection(name, port)) as connection:
                connection.request(
                    "GET", "/metrics", headers={"Authorization": f"Bearer {self.sites.files.prometheus_key}"}
                )
                said = connection.getresponse()
                assert said.status == 200, said.read()
                return said.read().decode()

        return self.sites.machine(CLIENT).inside(ask)

    def until_seen(self) -> None:
        """Waits until the gateway sees every node ready."""

        def ready() -> int:
            with closing(self._connection(GATEWAY, API_PORT)) as connection:
                connection.request("GET", "/health")
                return int(json.loads(connection.getresponse().read())["nodes_ready"])

        deadline = time.monotonic() + TIMEOUT_S
        while self.sites.machine(CLIENT).inside(ready) < len(NODES):
            assert time.monotonic() < deadline, "the gateway does not see all nodes"
            time.sleep(0.05)

    def takes_old_tls(self, name: str, port: int) -> bool:
        """Whether a port lets in who speaks TLS 1.2 and has no certificate."""
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2

        def ask() -> bool:
            with socket.create_connection((ADDRESSES[name], port), timeout=TIMEOUT_S) as connection:
                try:
                    old.wrap_socket(connection).close()
                except OSError:
                    return False
                return True

        return self.sites.machine(GATEWAY).inside(ask)

    def _connection(self, name: str, port: int) -> http.client.HTTPConnection:
        if self._trust is None:
            return http.client.HTTPConnection(ADDRESSES[name], port, timeout=TIMEOUT_S)
        return http.client.HTTPSConnection(ADDRESSES[name], port, timeout=TIMEOUT_S, context=self._trust)

    # What operators do

    def drain_link(self) -> None:
        """Drains the link between the sites, and uses it again."""
        ca = self._authority
        secure = [] if ca is None else ["--ca", str(ca)]
        url = f"{'http' if ca is None else 'https'}://{ADDRESSES[GATEWAY]}:{API_PORT}"
        key = {"PRFAAS_OPERATOR_KEY": self.sites.files.operator_key}
        for undo in ([], ["--undo"]):
            self.sites.prfaas("drain", "remote:home", "--url", url, *secure, *undo, environment=key)

    def move(self, text: str) -> None:
        """Has the remote node send a prompt's KVCache to a node at home, as a gateway would."""
        files = self.sites.files
        arguments = [str(files.folder / "gateway.toml"), ADDRESSES[AWAY], ADDRESSES[FIRST], text]
        done = run(self.sites.machine(GATEWAY), [*python_module("tests.borders.move"), *arguments])
        assert done.returncode == 0, done.stderr
        self.secrets.add("ticket", bytes.fromhex(done.stdout.split()[-1]))

    # What was said beyond the tunnel

    def learn(self, heard: Mapping[Flow, Iterable[bytes]], texts: Iterable[str]) -> None:
        """Notes tickets and salts that engines were told, and what follows from them."""
        parts = [part for said in heard.values() for part in said]
        salts = {bytes.fromhex(found.decode()) for part in parts for found in SALT.findall(part)}
        for part in parts:
            self.secrets.add("ticket", *(_decoded(found) for found in SECRET.findall(part)))
            self.secrets.add("salt", *NAMESPACE.findall(part))
        self.secrets.add("salt", *salts)
        for text in texts:
            tokens = byte_tokenizer().encode(f"user: {text}\nassistant: ").ids
            self.secrets.add("block", *(block_hashes(tokens, BLOCK_SIZE, salt)[1] for salt in salts))
            self.secrets.add("KVCache", EmulatedSequence().append(tokens[: 2 * BLOCK_SIZE])[-1])


def _decoded(secret: bytes) -> bytes:
    return base64.b64decode(secret, altchars=b"-_" if b"-" in secret or b"_" in secret else None)
