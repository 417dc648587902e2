"""What `--help` says of each command of `prfaas`: a line, more where a user needs it, and an example."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class CommandDescription:
    """`help` is the line beside the command's name; `example` is a whole command line."""

    help: str
    example: str
    more: str = ""

    def arguments(self) -> dict[str, Any]:
        """As argparse's `add_parser` takes them."""
        sentence = f"{self.help[0].upper()}{self.help[1:]}."
        return {
            "help": self.help,
            "description": f"{sentence} {self.more}".strip(),
            "epilog": f"Example: {self.example}",
        }


COMMANDS: Final = MappingProxyType(
    {
        "demo": CommandDescription(
            "start two clusters here, replay a real trace, check every claim, and end",
            "prfaas demo --requests 20",
            "It takes minutes. Exit status 0: all requests were answered, a sample had the right tokens, no page is left.",
        ),
        "up": CommandDescription(
            "start a gateway and its clusters on this machine and leave them running",
            "prfaas up -c configs/local.toml --port 8000",
            "Ctrl-C ends it: running streams finish first. Logs are in DIR/up.",
        ),
        "gateway": CommandDescription(
            "run one gateway",
            "prfaas gateway -c configs/hosts/gateway.toml",
            "SIGHUP makes it read its file again, SIGTERM ends it. docs/reference/gateway.md explains the file.",
        ),
        "node": CommandDescription(
            "run one node: its agent and its engine",
            "prfaas node -c configs/hosts/east-p0.toml",
            "Arguments after -- go to the engine. Give a file, or at least --model; sizes are in bytes, keys in _s in seconds. "
            "SIGTERM drains the node and ends it.",
        ),
        "epp": CommandDescription(
            "run an endpoint picker for Envoy, or for a gateway of Kubernetes' Gateway API",
            "prfaas epp --endpoints endpoints.json",
            "It chooses among model servers that a file or Kubernetes lists. SIGTERM ends it. "
            "docs/guides/endpoint_picker.md explains it.",
        ),
        "explain": CommandDescription(
            "show where the gateway would send a request now, and why; sends nothing",
            "prfaas explain --tokens 30000",
            "Exit status: 0 if the request would be accepted, 1 if it would be refused, 2 if the gateway was not asked.",
        ),
        "check": CommandDescription(
            "check that a gateway's nodes fit together and reach each other",
            "prfaas check -c gateway.toml",
            "Exit status: 0 no error, 1 errors, 2 the file cannot be used.",
        ),
        "top": CommandDescription(
            "show links, clusters, nodes and requests of a running gateway, every second",
            "prfaas top --url http://127.0.0.1:8000 --every 5",
        ),
        "flows": CommandDescription(
            "follow transfers between clusters, with their reasons",
            "prfaas flows --link east:west --kind request",
        ),
        "drain": CommandDescription(
            "stop new work over a link, or to a node, for maintenance",
            "prfaas drain --node west-d0 --timeout 300",
            "Running work goes on. --undo ends the drain.",
        ),
        "reload": CommandDescription(
            "make a gateway read its file again, and show what changed",
            "prfaas reload --dry-run",
            "Exit status 3 means that some changes need a restart.",
        ),
        "convert": CommandDescription(
            "change the role of a node of a PD cluster while it serves",
            "prfaas convert west-p0 --to decode",
            "The node drains, changes its role, and verifies its engine; if that fails, it keeps the old role.",
        ),
        "nodes": CommandDescription(
            "list the nodes of a gateway, add one, or remove one, while it serves",
            "prfaas nodes add west-d2 10.0.0.7:7001 -c gateway.toml",
        ),
        "nodes list": CommandDescription(
            "list the nodes that a gateway's file and its registries name",
            "prfaas nodes list --json",
            "Exit status: 1 if a registry cannot be read, else 0.",
        ),
        "nodes add": CommandDescription(
            "add a node to the file that gateways watch, or to their etcd",
            "prfaas nodes add west-d2 10.0.0.7:7001 --label rack=b4",
            "Gateways use the node as soon as its agent answers and it is ready.",
        ),
        "nodes remove": CommandDescription(
            "remove a node from the file that gateways watch, or from their etcd",
            "prfaas nodes remove west-d2",
            "Its requests end; nothing new is sent to it. The node itself goes on running.",
        ),
        "init": CommandDescription(
            "write commented files for a first system, on one machine or several",
            "prfaas init site --model models/kimi_linear --decode 10.0.0.2 --remote 192.0.2.7 --gateway 10.0.0.1",
            "It asks for what the arguments leave out, if standard input is a terminal.",
        ),
        "key": CommandDescription(
            "make an API key for a tenant of a gateway, or for an operator",
            "prfaas key acme --expires 2027-01-31",
            "It prints the key once, and the lines for the gateway's file, which hold only its SHA-256.",
        ),
        "certificates": CommandDescription(
            "make a certificate authority, and certificates for nodes, gateways and operators",
            "prfaas certificates east/prefill/east-p0=192.0.2.7 west/node/west-d0=10.0.0.2 gateway=10.0.0.1 --out tls",
        ),
        "model": CommandDescription(
            "build a tiny model of a real hybrid architecture, offline",
            "prfaas model build --arch kimi_linear --out models/kimi_linear",
        ),
        "model build": CommandDescription(
            "write a tiny model with seeded random weights and a byte-level tokenizer to a directory",
            "prfaas model build --arch kimi_linear --out models/kimi_linear",
        ),
    }
)
