"""What can be set is written down."""

from dataclasses import fields
from pathlib import Path

import pytest

from gateway.config.gateway import GatewayConfig, RoutingConfig, Strangers, Timeouts
from gateway.config.gateway import NodeAddress as Agent
from gateway.config.plan import PlanConfig
from node.config import NodeConfig
from planner.decisions.routing.offload import Reason
from planner.service.config import ServiceConfig
from planner.solve.control.controller import ControllerConfig
from planner.solve.control.ledger import PlanLimits
from transport.metrics import LINK_METRICS

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, heading: str) -> str:
    """The rows of all tables in a section."""
    section = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return "\n".join(line for line in section.splitlines() if line.startswith("|"))


@pytest.mark.parametrize("key", [field.name for field in fields(NodeConfig)])
def test_every_key_of_a_node_is_explained(key: str) -> None:
    assert f"`{key}`" in rows("reference/node.md", "A node's settings")


@pytest.mark.parametrize(
    "key",
    [
        field.name
        for part in (GatewayConfig, RoutingConfig, Timeouts, PlanConfig, Strangers, Agent)
        for field in fields(part)
    ],
)
def test_every_key_of_a_gateway_is_explained(key: str) -> None:
    section = rows("reference/gateway.md", "The gateway's settings")
    assert f"`{key}`" in section or f"[gateway.{key}]" in section


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_that_an_answer_says_is_explained(reason: Reason) -> None:
    assert f"| `{reason}` |" in rows("reference/api.md", "Headers")


@pytest.mark.parametrize("name", LINK_METRICS)
def test_every_metric_of_a_link_is_explained(name: str) -> None:
    assert f"`{name}`" in rows("guides/watching.md", "Links, load and memory of a node")


@pytest.mark.parametrize(
    "key", [field.name for part in (ServiceConfig, ControllerConfig, PlanLimits) for field in fields(part)]
)
def test_every_key_of_a_plan_service_is_explained(key: str) -> None:
    section = rows("reference/plan.md", "The plan service's settings")
    assert f"`{key}`" in section or f"[plan.{key}]" in section
