"""The site file: clusters, links, workload, SLOs and the model's profile, read from TOML into values.

Units are in the key names, an unknown key is an error that names it, and tables of numbers say where they come from.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from membership.lines import Line, by_ends, check_lines, read_lines
from planner.decisions.views import ClusterKind
from planner.errors import InputError
from planner.model.demand.fitted import (
    CACHE,
    arrivals_of,
    burst_index_of,
    caches_of,
    category_names_of,
    lengths_of,
    longest_of,
    output_spread_of,
)
from planner.model.demand.slo import Slo
from planner.model.demand.week import fitted_week
from planner.model.profile import Floats, ModelProfile, load_profile, provenance_kind
from planner.model.reading import GBPS, LEAST, RATE, SHARE, TOKENS, Range, named, number, placed, read_json
from planner.model.trace_files.arrivals import KeptArrivals
from planner.model.traffic import Lengths, TruncatedLogNormal
from transport.control.settings import (
    SettingsError,
    build,
    in_file,
    read_toml,
    require,
    require_known,
    require_table,
    require_tables,
)

INSTANCES: Final = Range(0, 1e5, "instances", is_whole=True)
PRICE: Final = Range(0, 1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`instances` engines of one kind of hardware. Cache and fetch rate are per instance; prices per instance.

    Of a cluster that says no `cache_gb` caches never evict, and one that says no `fetch_gbps` moves prefixes as fast as gateways
    suppose; `--ideal` takes both for 0.

    `home_share` is the part of all requests whose gateway decodes in this PD cluster; where no cluster has one, load decides.
    """

    name: str
    kind: ClusterKind
    hardware: str
    instances: int
    price_per_hour: float = 0.0
    cache_gb: float | None = None
    fetch_gbps: float | None = None
    home_share: float = 0.0
    provenance: str = ""

    def __post_init__(self) -> None:
        INSTANCES.of("instances", self.instances)
        PRICE.of("price_per_hour", self.price_per_hour)
        if self.cache_gb is not None:
            CACHE.of("cache_gb", self.cache_gb)
        if self.fetch_gbps is not None:
            GBPS.of("fetch_gbps", self.fetch_gbps)
        SHARE.of("home_share", self.home_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked: uncached prompt lengths, mean answer length, and where they come from.

    `slices` are other weeks or tenants that a robust plan must serve as well. `hit_ratio` is the share of prompt tokens
    that was taken out of the lengths as cached; None when it is not known. `caches_gb` are the caches of a node that they were
    taken out by, by PD cluster (None: never evicts); without it, by blocks seen before. `longest_prompt_tokens` counts what
    is cached, too: attention reaches back over all of it. `burst_index` is the variance over the mean of the requests that
    come in `BURST_S` seconds: 1 of a Poisson process. `output_spread` is the standard deviation of the answers' lengths over
    their mean. `arrivals` are its requests in their order, where a trace has said it. `week` are requests/s in the hours of a
    trace that is days long. `categories` are the names of those of its lengths and arrivals.
    """

    name: str
    lengths: Lengths
    output_tokens: float
    rate_req_per_s: float | None = None
    hit_ratio: float | None = None
    caches_gb: Mapping[str, float | None] | None = None
    longest_prompt_tokens: float | None = None
    burst_index: float = 1.0
    output_spread: float = 0.0
    arrivals: KeptArrivals | None = None
    week: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()
    slices: tuple[Lengths, ...] = ()
    provenance: str = ""

    def __post_init__(self) -> None:
        if not LEAST <= self.output_tokens <= TOKENS.high:
            raise InputError(f"workload: output_tokens={self.output_tokens}: must be above 0 and finite")
        if self.rate_req_per_s is not None and not LEAST <= self.rate_req_per_s <= RATE.high:
            raise InputError(f"workload: rate_req_per_s={self.rate_req_per_s}: must be above 0 and finite")
        if self.categories and self.arrivals is not None and self.arrivals.category is not None:
            most, names = int(self.arrivals.category.max()), len(self.categories)
            require(most < names, "arrivals.category", most, f"the place of one of {names} categories")

    @property
    def computed_tokens(self) -> Floats:
        """Where profiles are asked: at the uncached lengths, and at the longest prompt, however much of it is cached."""
        longest = self.longest_prompt_tokens
        return self.lengths.tokens if longest is None else np.append(self.lengths.tokens, longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A variant of the site: other counts, and choices that are pinned instead of solved for."""

    instances: Mapping[str, Any] = field(default_factory=dict)
    threshold_tokens: float | None = None
    num_prefill: int | None = None

    def __post_init__(self) -> None:
        for name, count in self.instances.items():
            require(type(count) is int, f"instances.{name}", count, str(INSTANCES))
            INSTANCES.of(f"instances.{name}", count)
        if self.threshold_tokens is not None:
            TOKENS.of("threshold_tokens", self.threshold_tokens)
        if self.num_prefill is not None:
            INSTANCES.of("num_prefill", self.num_prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Everything a plan depends on. `input_hash` names the bytes it was read from."""

    name: str
    profile: ModelProfile
    clusters: tuple[Cluster, ...]
    links: tuple[Line, ...]
    workload: Workload
    slo: Slo = field(default_factory=Slo)
    deployments: Mapping[str, Deployment] = field(default_factory=dict)
    input_hash: str = ""

    def __post_init__(self) -> None:
        names = [cluster.name for cluster in self.clusters]
        if len(set(names)) < len(names):
            raise InputError(f"clusters: names must differ: {', '.join(names)}")
        ends = [(link.source, link.destination) for link in self.links]
        if twice := [pair for at, pair in enumerate(ends) if pair in ends[:at]]:
            raise InputError(f"links: there are two from {twice[0][0]!r} to {twice[0][1]!r}; add them up")
        for link in self.links:
            for end in (link.source, link.destination):
                if end not in names:
                    raise InputError(f"links: {end!r} is not a cluster; known: {', '.join(names)}")
            self._check_direction(link)
        if not self.of_kind(ClusterKind.PD):
            raise InputError("clusters: at least one of kind 'pd' is needed, to decode")
        total = sum(self.homes.values())
        if self.homes and abs(total - 1.0) > 1e-6:
            raise InputError(
                f"clusters: home_share adds up to {total:g} over pd clusters; it must be 1, or be left out"
            )

    def _check_direction(self, link: Line) -> None:
        """KVCache goes from PrfaaS to PD clusters; prefixes that move take the same line. Raises InputError."""
        source, destination = (
            next(cluster.kind for cluster in self.clusters if cluster.name == end)
            for end in (link.source, link.destination)
        )
        if (source, destination) == (ClusterKind.PRFAAS, ClusterKind.PD):
            return
        if (source, destination) == (ClusterKind.PD, ClusterKind.PRFAAS):
            raise InputError(
                f"links: from {link.source!r} to {link.destination!r}: KVCache goes the other way; write source = "
                f'"{link.destination}", destination = "{link.source}"'
            )
        raise InputError(
            f"links: from {link.source!r} to {link.destination!r}: a link goes from a prfaas cluster to a pd one"
        )

    def of_kind(self, kind: ClusterKind) -> list[Cluster]:
        return [cluster for cluster in self.clusters if cluster.kind is kind]

    @property
    def homes(self) -> dict[str, float]:
        """Shares of requests by the PD cluster that must decode them; empty where load decides."""
        shares = {cluster.name: cluster.home_share for cluster in self.of_kind(ClusterKind.PD)}
        return shares if any(shares.values()) else {}

    def link(self, source: str, destination: str) -> Line | None:
        """The link between two clusters, if there is one."""
        ends = (source, destination)
        return next((link for link in self.links if (link.source, link.destination) == ends), None)

    def deployed(self, name: str) -> tuple["Site", Deployment]:
        """The site as one of its deployments has it. Raises InputError naming those there are."""
        if name not in self.deployments:
            known = ", ".join(self.deployments) or "none"
            raise InputError(f"deployment {name!r} is not in the site file; known: {known}")
        variant = self.deployments[name]
        clusters = tuple(
            replace(cluster, instances=variant.instances.get(cluster.name, cluster.instances))
            for cluster in self.clusters
        )
        return replace(self, clusters=clusters), variant

    def provenances(self) -> dict[str, str]:
        """Where each group of numbers comes from."""
        profile = self.profile
        named = {f"cluster {c.name}": c.provenance for c in self.clusters}
        named |= {f"link {link.source} to {link.destination}": link.provenance for link in self.links}
        named |= {"workload": self.workload.provenance, "slo": self.slo.provenance}
        used = {cluster.hardware for cluster in self.clusters if cluster.instances}
        if profile.kv is not None:
            named["S_kv"] = profile.kv.provenance
        named |= {f"T_prefill {hw}": curve.provenance for hw, curve in profile.prefill.items() if hw in used}
        named |= {f"decode {hw}": decode.provenance for hw, decode in profile.decode.items() if hw in used}
        decoding = {cluster.hardware for cluster in self.of_kind(ClusterKind.PD) if cluster.instances}
        named |= {f"memory {hw}": memory.provenance for hw, memory in profile.memory.items() if hw in decoding}
        return {what: text or "unverified: not stated" for what, text in named.items()}


def load_site(path: Path, workload: Path | None = None) -> Site:
    """Reads a site file; `workload` (a fitted one, JSON) replaces its own. Raises InputError naming the file."""
    with in_file(path, InputError):
        table = read_toml(path)
        if workload:
            table["workload"] = {"kind": "fitted", "path": str(workload.resolve())}
        try:
            site = parse_site(table, path.parent)
        except InputError as exc:
            raise SettingsError(str(exc)) from exc
    read = [path, workload, path.parent / table["profile"]] if workload else [path, path.parent / table["profile"]]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in read if file))
    return replace(site, input_hash=digest.hexdigest()[:16])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    """A site file's keys. The workload has one set of keys per kind, so its reader parses it."""

    schema: int
    name: str
    profile: Path
    workload: Mapping[str, Any]
    clusters: tuple[Cluster, ...] = ()
    links: tuple[Line, ...] = ()
    lines_file: Path | None = None
    slo: Slo = field(default_factory=Slo)
    deployments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.schema == 1, "schema", self.schema, "1")


def parse_site(table: Mapping[str, Any], folder: Path) -> Site:
    """A site from its TOML form; paths in it are relative to `folder`. Raises SettingsError or InputError."""
    document = build(_Document, table, "", folder)
    described = read_lines(document.lines_file) if document.lines_file is not None else ()
    lines = (*document.links, *(line for line in described if _is_of(line, document.clusters)))
    check_lines(lines, "links")
    site = Site(
        name=document.name,
        profile=load_profile(document.profile),
        clusters=document.clusters,
        links=tuple(by_ends(lines).values()),
        workload=parse_workload(document.workload, folder),
        slo=document.slo,
        deployments={
            name: build(Deployment, entry, f"[deployments.{name}]") for name, entry in document.deployments.items()
        },
    )
    _check_caches(site)
    for text in site.provenances().values():
        provenance_kind(text)
    for name, deployment in site.deployments.items():
        with placed(f"[deployments.{name}]"):
            _check_deployment(site, deployment)
    return site


def _is_of(line: Line, clusters: Sequence[Cluster]) -> bool:
    """Whether a line of a file for a whole fleet is one of this site."""
    names = {cluster.name for cluster in clusters}
    return {line.source, line.destination} <= names


def _check_deployment(site: Site, deployment: Deployment) -> None:
    """It counts instances of clusters that are there, and pins no more of them than it has. Raises SettingsError."""
    require_known(deployment.instances, [cluster.name for cluster in site.clusters], "instances")
    if deployment.num_prefill is not None and len(pds := site.of_kind(ClusterKind.PD)) == 1:
        most = deployment.instances.get(pds[0].name, pds[0].instances)
        fits = deployment.num_prefill <= most
        require(fits, "num_prefill", deployment.num_prefill, f"at most {most}, the instances of {pds[0].name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """`kind = "lengths"`: prompt lengths, one by one."""

    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        require(bool(self.tokens), "tokens", self.tokens, "at least one length")
        for at, length in enumerate(self.tokens):
            TOKENS.of(f"tokens[{at}]", length)

    def __str__(self) -> str:
        return f"{len(self.tokens)} lengths"

    def lengths(self) -> Lengths:
        return Lengths.of(np.asarray(self.tokens, dtype=np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What every workload that is no fitted one says beside its lengths."""

    output_tokens: float
    rate_req_per_s: float | None = None
    provenance: str = ""


_LAWS: Final[Mapping[str, type[TruncatedLogNormal] | type[_Listed]]] = {
    "lognormal": TruncatedLogNormal,
    "lengths": _Listed,
}


def parse_workload(table: Mapping[str, Any], folder: Path) -> Workload:
    """A workload from its table: kind `lognormal`, `lengths` (a list of prompt lengths) or `fitted` (a JSON file).

    Slices have what they do not say themselves from the workload that they are slices of.
    """
    kind = table.get("kind")
    if kind == "fitted":
        return read_fitted(folder / build(_Fitted, table, "[workload]").path)
    require(isinstance(kind, str) and kind in _LAWS, "[workload]: kind", kind, "'lognormal', 'lengths' or 'fitted'")
    asked = {each.name: table[each.name] for each in fields(_Asked) if each.name in table}
    rest = {key: value for key, value in table.items() if key not in (*asked, "kind", "slices")}
    said = build(_Asked, asked, "[workload]")
    law = build(_LAWS[str(kind)], rest, "[workload]")
    slices = require_tables(table.get("slices", []), "workload.slices")
    return Workload(
        name=str(law),
        lengths=law.lengths(),
        output_tokens=said.output_tokens,
        rate_req_per_s=said.rate_req_per_s,
        slices=tuple(parse_workload({"kind": kind, **asked, **entry}, folder).lengths for entry in slices),
        provenance=said.provenance,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    """`kind = "fitted"`: a file that `fit` wrote."""

    kind: str
    path: str


def read_fitted(path: Path) -> Workload:
    """A workload that `fit` wrote. Raises InputError naming the file, the key and its value."""
    with named(f"workload {path}"):
        table = read_json(path)
        require(table.get("schema") == 1, "schema", table.get("schema"), "1")
        rate = table.get("rate_req_per_s")
        texts = {key: table.get(key) for key in ("name", "provenance")}
        for key, text in texts.items():
            require(isinstance(text, str), key, text, "a string")
        lengths = require_table(table.get("uncached_tokens"), "uncached_tokens")
        return Workload(
            name=str(texts["name"]),
            lengths=lengths_of(lengths),
            categories=category_names_of(lengths),
            output_tokens=TOKENS.above_low("output_tokens_mean", table.get("output_tokens_mean")),
            rate_req_per_s=None if rate is None else RATE.above_low("rate_req_per_s", rate),
            hit_ratio=None if table.get("hit_ratio", 0) is None else number(table, "hit_ratio", SHARE),
            caches_gb=caches_of(table),
            longest_prompt_tokens=longest_of(table),
            burst_index=burst_index_of(table),
            output_spread=output_spread_of(table),
            arrivals=arrivals_of(table),
            week=fitted_week(table.get("week_req_per_s", [])),
            provenance=str(texts["provenance"]),
        )


def _check_caches(site: Site) -> None:
    """A fitted workload has been fitted for the caches that the site has. Raises InputError."""
    workload = site.workload
    if not workload.hit_ratio:
        return
    for cluster in site.of_kind(ClusterKind.PD):
        fitted = None if workload.caches_gb is None else workload.caches_gb.get(cluster.name)
        if fitted != cluster.cache_gb:
            sizes = [f"{size:g} GB" if size is not None else "no end" for size in (fitted, cluster.cache_gb)]
            raise InputError(
                f"workload {workload.name}: fitted for a cache of {sizes[0]} per node, cluster {cluster.name!r} has one of "
                f"{sizes[1]} (cache_gb): fit the trace again with -c and this site"
            )
