"""What gRPC is told before it is imported."""

import os
from collections.abc import Callable, Sequence

import pytest

from planner.commands.cli import main as plan
from prfaas.cli import main as command
from transport.control.grpc_environment import SETTINGS, for_grpc


def test_what_an_environment_says_holds() -> None:
    assert for_grpc({}) == dict(SETTINGS)
    key = next(iter(SETTINGS))
    assert key not in for_grpc({key: "mine"})


@pytest.mark.parametrize("main", [command, plan])
def test_every_command_sets_it_before_it_loads_grpc(
    main: Callable[[Sequence[str]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in SETTINGS:
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert {key: os.environ.get(key) for key in SETTINGS} == dict(SETTINGS)
