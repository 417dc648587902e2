"""A plan service for a site: `plan.toml`, and how the gateway comes to follow it."""

from collections.abc import Mapping
from dataclasses import dataclass

from transport.path.tcp import format_address, is_loopback

PLAN_FILE = "plan.toml"
PLAN_KEY = "plan.key"
PLAN_PORT = 8100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSite:
    """Where the service is to run, and the gateway's URL. `identity` are keys and files of its certificate.

    `key_file` has an operator's key of the gateway, "" for none.
    """

    host: str
    gateway: str
    key_file: str
    identity: Mapping[str, str]

    @property
    def url(self) -> str:
        """Over mutual TLS, but where only its own machine reaches it."""
        scheme = "http" if is_loopback(self.host) else "https"
        return f"{scheme}://{format_address(self.host, PLAN_PORT)}"


def plan_file(site: PlanSite) -> str:
    """The service's configuration, but for what its operator must choose."""
    lines = [
        f"# The plan service, if you want one: on {site.host}, run `prfaas-plan serve -c {PLAN_FILE}`.",
        "# It starts once profile, hardware and line are filled in. All keys are in docs/reference/plan.md.",
        "",
        "[plan]",
        '# profile = "profiles/internal-1t.json"  # times of your model; prfaas-plan profile and fit make one',
        '# pd_hardware = "h20x8"                  # as the profile calls it',
        '# prfaas_hardware = "h200x8"',
        "# egress_gbps = 100                      # from the PrfaaS cluster to the PD cluster",
        f'host = "{site.host}"',
        f"port = {PLAN_PORT}",
        f'gateways = ["{site.gateway}"]',
        'state_dir = "plan"                       # beside this file; under systemd in the folder of its unit',
    ]
    lines += [f'gateway_key_file = "{site.key_file}"'] if site.key_file else []
    lines += [f'{key} = "{file}"' for key, file in site.identity.items()]
    return "\n".join(lines) + "\n"


def followed_lines(site: PlanSite) -> list[str]:
    """What the gateway's file says of it, to be uncommented."""
    return [
        f"# [gateway.plan]                         # follow the plan service of {PLAN_FILE}, once it runs",
        f'# url = "{site.url}"',
        '# plan_file = "followed-plan.json"',
    ]


def start_lines(site: PlanSite) -> list[str]:
    """What START.md says of it."""
    own = [PLAN_FILE, *([site.key_file] if site.key_file else []), site.identity["certificate"], site.identity["key"]]
    files = ", ".join(f"`{file}`" for file in own)
    return [
        f"A plan service is optional: on {site.host}, `prfaas-plan serve -c {PLAN_FILE}` needs {files}.",
        f"Fill in its profile, and uncomment `[gateway.plan]` in `gateway.toml`. `prfaas-plan show --url {site.url}"
        + (" --certificate certificates/operator.pem` asks it." if site.url.startswith("https") else "` asks it."),
    ]
