"""`prfaas init`: asks little, and writes commented files for a first system.

On one machine that is one file, for `prfaas up`; on several, one for each process, and START.md, which says what to run where.
"""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Final

from gateway.auth.keyring import digest_of
from gateway.config.operators import OperatorRole
from hybrid_cache.hashing.name_secrets import SECRET_BYTES
from prfaas.commands.keys import new_key, operator_lines
from prfaas.commands.site_files.first_steps import INSTALLED, NodePorts, firewall_lines, question_lines
from prfaas.commands.site_files.model_tables import SiteModel, check_models, model_tables, own_model
from prfaas.commands.site_files.plan_files import PLAN_KEY, PlanSite, followed_lines, plan_file, start_lines
from prfaas.commands.site_files.scraping import DIGEST_FILE, KEY_FILE, OPERATOR, ScrapeJob, prometheus_file
from prfaas.commands.site_files.trust_files import CERTIFICATES, authority_lines, identity_files
from prfaas.errors import InitError
from prfaas.system.certificates import (
    GATEWAY_NAME,
    PLANNER_NAME,
    CertificateHolder,
    clusterless,
    issue,
    node_holder,
)
from transport.path.tcp import format_address, is_loopback
from transport.peers.name import PeerRole

HERE: Final = "127.0.0.1"
ENGINES: Final = ("embedded", "vllm", "sglang")
PORTS: Final = {
    "control_port": (7001, "gateways ask here (gRPC)"),
    "calls_port": (7401, "and reserve room for every request here"),
    "transfer_port": (7101, "KVCache arrives here, from prefill nodes of all clusters"),
    "engine_port": (7201, "gateways send requests here (HTTP; over TLS with certificates)"),
    "metrics_port": (7301, "Prometheus"),
}
GATEWAY_PORT: Final = 8000
FIRST_OPERATOR: Final = "first-operator"
AUTHORITY: Final = "certificates/authority.pem"
NAMES_FILE: Final = "names.secret"
IN_CLEAR: Final = (
    "plain = true                             # known: anybody on this network can read, and ask, what others do"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitSite:
    """What there is to know. `remote` are machines of a PrfaaS cluster, which only prefill; the others are one PD cluster.

    `model` is a folder. `more_models` are served beside it, each by nodes of its own on every machine.
    """

    model: str
    name: str = ""  # what clients call it; "": as its folder
    more_models: tuple[SiteModel, ...] = ()
    engine: str = "embedded"
    gateway: str = HERE
    remote: tuple[str, ...] = (HERE,)
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = (HERE,)
    tls: bool = False
    one_authority: bool = False  # signs for all clusters, as before there were lists

    def __post_init__(self) -> None:
        """Raises InitError."""
        if not self.model:
            raise InitError("no model: name a directory with config.json, weights and tokenizer")
        check_models(self.models)
        if self.engine not in ENGINES:
            raise InitError(f"engine {self.engine!r}: must be one of {', '.join(ENGINES)}")
        if not self.decode:
            raise InitError("no decode node: at least one is needed")
        if self.engine == "sglang" and self.tls:
            raise InitError("engine 'sglang': its servers cannot use certificates, so TLS is not possible")
        if self.engine == "sglang" and not (self.prefill or self.remote):
            raise InitError("engine 'sglang': its decode nodes compute no prompts; name machines that prefill")
        for host in (self.gateway, *self.remote, *self.prefill, *self.decode):
            if not host or not all(c.isalnum() or c in "-.:" for c in host):
                raise InitError(f"host {host!r}: must be a name or an address")

    def with_absolute_models(self) -> "InitSite":
        """As on every command line, folders are relative to where it runs."""
        first, *more = (SiteModel(str(Path(each.path).absolute()), each.name) for each in self.models)
        return replace(self, model=first.path, more_models=tuple(more))

    @property
    def models(self) -> tuple[SiteModel, ...]:
        """All of them, the default one first."""
        return (SiteModel(self.model, self.name), *self.more_models)

    @property
    def is_one_machine(self) -> bool:
        return {self.gateway, *self.remote, *self.prefill, *self.decode} == {HERE}


@dataclass(frozen=True, slots=True)
class SiteNode:
    """A node to be; `nth` of its machine, from 0: a second one has ports of its own."""

    name: str
    cluster: str
    kind: str
    role: str
    host: str
    nth: int
    model: SiteModel


def members(site: InitSite) -> list[SiteNode]:
    """Every node, the PrfaaS cluster's first."""
    seats: Counter[str] = Counter()
    found = []
    for cluster, kind, role, hosts in (
        ("remote", "prfaas", "prefill", site.remote),
        ("home", "pd", "prefill", site.prefill),
        ("home", "pd", "decode", site.decode),
    ):
        for number, (model, host) in enumerate(product(site.models, hosts)):
            found.append(SiteNode(f"{cluster}-{role[0]}{number}", cluster, kind, role, host, seats[host], model))
            seats[host] += 1
    return found


@dataclass(frozen=True, slots=True)
class FirstKeys:
    """What opens a site of several machines: keys for clients, for operators, and for Prometheus. Files have digests of them.

    Without one for clients, the gateway is for its own machine, and so are its pages. `planner` is for a plan service to
    ask the gateway, `names` is what blocks are named by.
    """

    prometheus: str
    planner: str = ""
    tenant: str = ""
    operator: str = ""
    names: str = ""


def files(site: InitSite, keys: FirstKeys) -> dict[str, str]:
    """What to write: names and contents."""
    if site.is_one_machine:  # whose files all lie here
        return {"prfaas.toml": _topology(site.with_absolute_models())}
    nodes = members(site)
    return {
        KEY_FILE: f"{keys.prometheus}\n",
        DIGEST_FILE: f"{digest_of(keys.prometheus)}\n",
        **({NAMES_FILE: f"{keys.names}\n"} if site.tls else {}),
        "prometheus.yml": prometheus_file(_scrape_jobs(site, nodes, keys)),
        **{f"{node.name}.toml": _node_file(site, node) for node in nodes},
        "gateway.toml": _gateway_file(site, nodes, keys),
        **({"plan.toml": plan_file(_plan_site(site, keys))} if site.tls else {}),
        **({PLAN_KEY: f"{keys.planner}\n"} if keys.planner else {}),
        "START.md": _start(site, nodes, keys),
    }


def init(site: InitSite, folder: Path, overwrite: bool, say: Callable[[str], None]) -> None:
    """Writes them, with certificates if they are asked for. Raises InitError, CertificateError."""
    site = replace(site, one_authority=(folder / AUTHORITY).with_suffix(".key").exists())
    names = secrets.token_hex(SECRET_BYTES)
    keys = FirstKeys(new_key(), names=names)
    if site.gateway != HERE:
        keys = replace(keys, tenant=new_key(), operator=new_key(), planner=new_key() if site.tls else "")
    contents = files(site, keys)
    there = sorted(name for name in contents if (folder / name).exists())
    if there and not overwrite:
        raise InitError(f"{folder}: {', '.join(there)}: already there; --overwrite replaces them")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            _write(folder / name, text)
    except OSError as exc:
        raise InitError(f"{folder}: {exc.strerror or exc}") from exc
    if site.tls and not site.is_one_machine:  # `prfaas up` makes its own
        issue(folder / CERTIFICATES, _holders(site), days=365, by_cluster=not site.one_authority)
    say(f"wrote {', '.join(contents)} to {folder}")
    if not site.tls and not site.is_one_machine:
        why = "its servers know no certificates" if site.engine == "sglang" else "as --plain wants it"
        say(f"in clear, {why}: carry all of it over a network that you trust, or over a VPN")
    if keys.operator and not site.is_one_machine:
        say(f"API key, shown this once, of tenant 'first': {keys.tenant}")
        say(f"Operator's key, shown this once, of '{FIRST_OPERATOR}', who may do all: {keys.operator}")
    for line in _next_steps(site, folder):
        say(line)


def _write(path: Path, text: str) -> None:
    """A key is for its owner, and never for others, not even for a moment."""
    if path.name in (KEY_FILE, NAMES_FILE, PLAN_KEY):
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
    path.write_text(text)


def _scrape_jobs(site: InitSite, nodes: Sequence[SiteNode], keys: FirstKeys) -> list[ScrapeJob]:
    metrics_port = PORTS["metrics_port"][0]
    return [
        ScrapeJob(
            name="prfaas-gateway",
            targets=[format_address(site.gateway, GATEWAY_PORT)],
            key_file=KEY_FILE if keys.operator else "",
            scheme="https" if _has_https(site) else "http",
            authority=AUTHORITY,
        ),
        ScrapeJob(
            name="prfaas-node",
            targets=[format_address(node.host, metrics_port + node.nth) for node in nodes],
            key_file=KEY_FILE,
            scheme="https" if site.tls else "http",
            authority=AUTHORITY,
        ),
    ]


def _has_https(site: InitSite) -> bool:
    """Whether clients find the gateway behind its certificate; a gateway for its own machine needs none."""
    return site.tls and not is_loopback(site.gateway)


def _next_steps(site: InitSite, folder: Path) -> list[str]:
    if site.is_one_machine:
        build = f"build one:  prfaas model build --arch kimi_linear --out {site.model}"
        missing = (
            []
            if Path(site.model).exists()
            else [f"{site.model} is not there yet; to try things with a tiny one:", build]
        )
        return [*missing, f"start it:   prfaas up -c {folder}/prfaas.toml", "ask it:     prfaas check"]
    return [f"{folder}/START.md says what to run on which machine", f"then:  prfaas check -c {folder}/gateway.toml"]


def _holders(site: InitSite) -> list[CertificateHolder]:
    nodes = [node_holder(node.cluster, node.kind, node.name, (node.host,)) for node in members(site)]
    own = [clusterless(role, (site.gateway,)) for role in (PeerRole.GATEWAY, PeerRole.PLANNER)]
    return [*own, clusterless(PeerRole.OPERATOR), *nodes]


def _topology(site: InitSite) -> str:
    nodes = members(site)
    lines = [
        "# A gateway and its clusters on one machine: prfaas up -c this file.",
        "# All keys are in docs/reference/node.md and docs/reference/gateway.md.",
        "",
        "[model]",
        _pair("path", site.model, "the same files for every node"),
        *([_pair("name", site.name, "what clients call it")] if site.name else []),
        "",
        "[gateway]",
        _pair("port", GATEWAY_PORT, "the OpenAI API"),
        _pair(
            "threshold_tokens", 2048, "longer uncached prompts go to the PrfaaS cluster; prfaas-plan solve finds yours"
        ),
        "",
        "[node]                                   # what all nodes have in common",
        _pair("cache_bytes", 1 << 30, "of KVCache in /dev/shm, taken at the start"),
    ]
    lines += [_pair("engine", site.engine, f"see docs/guides/{site.engine}.md")] if site.engine != "embedded" else []
    lines += [_pair("integrity", "aead", "encrypted; certificates are made at the start")] if site.tls else []
    for cluster in dict.fromkeys((node.cluster, node.kind) for node in nodes):
        lines += ["", "[[clusters]]", _pair("name", cluster[0]), _pair("kind", cluster[1], WHAT_KINDS_ARE[cluster[1]])]
        lines.append("nodes = [")
        lines += [
            f'    {{ node_id = "{node.name}", role = "{node.role}"{own_model(node.model, site.more_models)} }},'
            for node in nodes
            if node.cluster == cluster[0]
        ]
        lines.append("]")
    lines += model_tables(site.more_models)
    return "\n".join(lines) + "\n"


WHAT_KINDS_ARE: Final = {"prfaas": "prefills for others", "pd": "prefills short prompts, and decodes"}


def _node_file(site: InitSite, node: SiteNode) -> str:
    lines = [
        f"# A {node.role} node of {node.cluster}: on {node.host}, run `prfaas node -c {node.name}.toml`.",
        "# All keys are in docs/reference/node.md.",
        "",
        "[node]",
        _pair("node_id", node.name),
        _pair("cluster", node.cluster),
        _pair("cluster_kind", node.kind, WHAT_KINDS_ARE[node.kind]),
        _pair("role", node.role),
        _pair("model", node.model.path, "the same files on every machine"),
        *([_pair("served_model", node.model.called)] if node.model.name or node.model in site.more_models else []),
        _pair("host", node.host, "where its ports listen, and what gateways and other nodes are told"),
        '# transfer_host = "203.0.113.7"         # an address of its own for KVCache, towards other clusters',
        *[_pair(name, port + node.nth, why) for name, (port, why) in _ports(site, node).items()],
        _pair("metrics_key", DIGEST_FILE, "metrics are for readers with the key of this digest"),
        _pair("cache_bytes", 1 << 30, "of KVCache in /dev/shm, taken at the start"),
    ]
    lines += [_pair("engine", site.engine, f"see docs/guides/{site.engine}.md")] if site.engine != "embedded" else []
    if node.kind == "prfaas":
        lines.append("# egress_bytes_per_s = 1.25e9            # of what leaves for each other cluster: 10 Gbit/s")
    if site.tls:
        lines += ["", *_identity(site, node.name), _pair("integrity", "aead", "encrypts KVCache on its way")]
        lines += [f"{f'peers = {_peers(site)}':<40} # whom KVCache is exchanged with, whatever a gateway says"]
    elif not is_loopback(node.host):
        lines.append(IN_CLEAR)
    return "\n".join(lines) + "\n"


def _peers(site: InitSite) -> str:
    """The nodes of all clusters, as TOML."""
    patterns = [f'"{cluster}/*"' for cluster in sorted({node.cluster for node in members(site)})]
    return f"[{', '.join(patterns)}]"


def _ports(site: InitSite, node: SiteNode) -> Mapping[str, tuple[int, str]]:
    if site.engine == "sglang" and node.role == "prefill":
        return PORTS | {
            "bootstrap_port": (7501, "decode nodes ask here; their servers need ports of its own choice, too")
        }
    return PORTS


def _links(nodes: Sequence[SiteNode]) -> list[str]:
    """Every link that there should be: the gateway reports one that is dead from the start."""
    sources, destinations = (
        dict.fromkeys(node.cluster for node in nodes if node.kind == kind) for kind in ("prfaas", "pd")
    )
    links = [f"{source}:{destination}" for source in sources for destination in destinations]
    return [f"links = {json.dumps(links)}  # missed where no node of theirs answers"] if links else []


def _gateway_file(site: InitSite, nodes: Sequence[SiteNode], keys: FirstKeys) -> str:
    lines = [
        f"# The gateway: on {site.gateway}, run `prfaas gateway -c gateway.toml`.",
        "# Nodes may start before or after it, and come and go.",
        "",
        "[gateway]",
        _pair("host", site.gateway),
        _pair("port", GATEWAY_PORT, "the OpenAI API"),
        _pair("tokenizer_dir", site.model, "the model's directory, or one with its tokenizer only"),
        *([_pair("served_model", site.name, "what clients call it")] if site.name else []),
        _pair(
            "threshold_tokens", 2048, "longer uncached prompts go to the PrfaaS cluster; prfaas-plan solve finds yours"
        ),
        *(_identity(site, GATEWAY_NAME) if site.tls else []),
        *(_https() if _has_https(site) else []),
        *([] if site.tls or all(is_loopback(node.host) for node in nodes) else [IN_CLEAR]),
        *_links(nodes),
    ]
    lines += model_tables(site.more_models)
    if keys.operator:
        lines += [
            "",
            "[gateway.tenants.first]                  # prfaas key NAME makes keys for more",
            _pair_of_keys("keys", digest_of(keys.tenant), "digests: the key itself was shown once"),
            "",
            *operator_lines(FIRST_OPERATOR, OperatorRole.ADMIN),
            _pair_of_keys("keys", digest_of(keys.operator), "prfaas key NAME --operator ROLE makes more"),
            "",
            *operator_lines(OPERATOR, OperatorRole.VIEWER),
            _pair_of_keys("keys", digest_of(keys.prometheus), f"the key is in {KEY_FILE}"),
        ]
    if keys.planner:
        lines += [
            "",
            *operator_lines(PLANNER_NAME, OperatorRole.VIEWER),
            _pair_of_keys("keys", digest_of(keys.planner), f"the key is in {PLAN_KEY}"),
        ]
    if site.tls:
        lines += ["", *followed_lines(_plan_site(site, keys))]
    for node in nodes:
        lines += [
            "",
            "[[gateway.nodes]]",
            _pair("agent", format_address(node.host, PORTS["control_port"][0] + node.nth)),
        ]
        lines += [_pair("name", node.name, "what its certificate must carry")] if site.tls else []
    return "\n".join(lines) + "\n"


def _plan_site(site: InitSite, keys: FirstKeys) -> PlanSite:
    return PlanSite(
        host=site.gateway,
        gateway=f"{'https' if _has_https(site) else 'http'}://{format_address(site.gateway, GATEWAY_PORT)}",
        key_file=PLAN_KEY if keys.planner else "",
        identity=identity_files(PLANNER_NAME, one_authority=site.one_authority),
    )


def _identity(site: InitSite, name: str) -> Iterator[str]:
    for key, file in identity_files(name, one_authority=site.one_authority).items():
        yield _pair(key, file)
    yield _pair("names_secret", NAMES_FILE, "blocks are named by it: the same on all machines, and kept secret")


def _https() -> Iterator[str]:
    yield _pair("tls_certificate", f"certificates/{GATEWAY_NAME}.pem", "HTTPS: clients trust authority.pem, or put")
    yield _pair("tls_key", f"certificates/{GATEWAY_NAME}.key", "a certificate here that they trust already")


def _start(site: InitSite, nodes: Sequence[SiteNode], keys: FirstKeys) -> str:
    lines = ["# What to run where", "", f"{INSTALLED} Nodes and the gateway may start in any order.", ""]
    if site.tls:
        clusters = list(dict.fromkeys(node.cluster for node in nodes))
        lines += [*authority_lines(clusters, one_authority=site.one_authority), ""]
    lines += ["| machine | needs | command |", "|---|---|---|"]
    lines += [
        f"| {node.host} | {_needs(site, node.name, [node.model], f'{node.name}.toml', DIGEST_FILE)} | "
        f"`prfaas node -c {node.name}.toml` |"
        for node in nodes
    ]
    lines.append(
        f"| {site.gateway} | {_needs(site, GATEWAY_NAME, site.models, 'gateway.toml')} | `prfaas gateway -c gateway.toml` |"
    )
    if site.tls:
        lines += ["", *start_lines(_plan_site(site, keys))]
    ports = ", ".join(f"{name} {port}" for name, (port, _) in PORTS.items())
    away, home = (
        [NodePorts.of(node.host, _ports(site, node), node.nth) for node in nodes if node.kind == kind]
        for kind in ("prfaas", "pd")
    )
    url = f"{'https' if _has_https(site) else 'http'}://{format_address(site.gateway, GATEWAY_PORT)}"
    return "\n".join(
        [
            *lines,
            "",
            *firewall_lines(site.gateway, away, home),
            *question_lines(site.gateway, url, AUTHORITY, has_keys=bool(keys.operator)),
            "",
            f"Prometheus needs `prometheus.yml`, `{KEY_FILE}`{f', `{AUTHORITY}`' if site.tls else ''} and a copy of "
            "`deploy/prometheus/rules.yml`.",
            "",
            f"Ports ({ports}) are explained in docs/guides/two-sites.md.",
            "",
        ]
    )


def _needs(site: InitSite, name: str, models: Sequence[SiteModel], *others: str) -> str:
    """What one process reads that its machine must hold, as a cell of the table."""
    own = [NAMES_FILE, f"certificates/{name}.pem", f"certificates/{name}.key"] if site.tls else []
    return ", ".join(f"`{file}`" for file in (*others, *own, *(each.path for each in models)))


def _pair(key: str, value: str | int, why: str = "") -> str:
    shown = str(value) if isinstance(value, int) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    line = f"{key} = {shown}"
    return f"{line:<40} # {why}" if why else line


def _pair_of_keys(name: str, digest: str, why: str) -> str:
    return f'{name} = ["{digest}"]  # {why}'


Ask = Callable[[str, str], str]


def asked(known: Mapping[str, str | None], ask: Ask) -> dict[str, str]:
    """What is known, and the user's answers to the rest; an empty answer is the default that was shown."""
    return {
        key: value if (value := known.get(key)) is not None else ask(question, default).strip() or default
        for key, (question, default) in QUESTIONS.items()
    }


QUESTIONS: Final = {
    "model": ("Directory of the model (config.json, weights, tokenizer)", "models/kimi_linear"),
    "engine": (f"Engine: {' or '.join(ENGINES)}", "embedded"),
    "decode": ("Machines that decode, by comma", HERE),
    "prefill": ("Machines beside them that prefill, by comma; - for none", "-"),
    "remote": ("Machines of the remote prefill cluster, by comma; - for none", HERE),
    "gateway": ("Machine of the gateway", HERE),
}


def site_of(
    answers: Mapping[str, str], tls: bool, plain: bool = False, more_models: Sequence[SiteModel] = ()
) -> InitSite:
    """Several machines get certificates unless `plain` says no, or their engine cannot. Raises InitError."""

    def hosts(text: str) -> tuple[str, ...]:
        return () if text in ("-", "") else tuple(host.strip() for host in text.split(","))

    first = SiteModel.parse(answers["model"])
    site = InitSite(
        model=first.path,
        name=first.name,
        more_models=tuple(more_models),
        engine=answers["engine"],
        gateway=answers["gateway"],
        remote=hosts(answers["remote"]),
        prefill=hosts(answers["prefill"]),
        decode=hosts(answers["decode"]),
        tls=tls,
    )
    may_have_tls = not (plain or site.is_one_machine or site.engine == "sglang")
    return replace(site, tls=True) if may_have_tls else site
