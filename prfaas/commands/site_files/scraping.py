"""What Prometheus is to scrape of a site: `prometheus.yml`, beside the files of the processes that it names."""

from collections.abc import Sequence
from dataclasses import dataclass

KEY_FILE = "prometheus.key"
DIGEST_FILE = "prometheus.sha256"
OPERATOR = "prometheus"

RULES = "rules.yml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeJob:
    """Processes of one kind, host:port each; `key_file` has what they must be shown, "" for nothing."""

    name: str
    targets: Sequence[str]
    key_file: str = ""
    scheme: str = "http"
    authority: str = ""


def prometheus_file(jobs: Sequence[ScrapeJob]) -> str:
    """The configuration, as YAML."""
    lines = [
        "# What to scrape of this site: Prometheus runs with this file where it reaches all of these ports.",
        "# rules.yml is deploy/prometheus/rules.yml: put a copy of it here. Alerts know jobs by the names below.",
        "global:",
        "  scrape_interval: 15s",
        "  evaluation_interval: 15s",
        "",
        "rule_files:",
        f"  - {RULES}",
        "",
        "scrape_configs:",
    ]
    for job in jobs:
        lines += [f"  - job_name: {job.name}"]
        lines += [f"    scheme: {job.scheme}"] if job.scheme != "http" else []
        if job.scheme == "https" and job.authority:
            lines += ["    tls_config:", f"      ca_file: {job.authority}"]
        if job.key_file:
            lines += ["    authorization:", f"      credentials_file: {job.key_file}"]
        lines += ["    static_configs:", f"      - targets: [{', '.join(map(_quoted, job.targets))}]"]
    return "\n".join(lines) + "\n"


def _quoted(target: str) -> str:
    return f'"{target}"'
