"""A wrong command line is told in two lines."""

import pytest

from planner.commands import cli as planner_cli
from prfaas import cli as prfaas_cli


@pytest.mark.parametrize(
    ("main", "argv", "said"),
    [
        (
            prfaas_cli.main,
            ["gatewya"],
            "prfaas: error: argument COMMAND: invalid choice: 'gatewya' (choose from 'demo'",
        ),
        (prfaas_cli.main, ["gatewya"], "(did you mean 'gateway'?)"),
        (
            prfaas_cli.main,
            ["up", "--prot", "8"],
            "prfaas up: error: unrecognized arguments: --prot 8 (did you mean '--port'?)",
        ),
        (prfaas_cli.main, ["nodes", "list", "all"], "prfaas nodes list: error: unrecognized arguments: all"),
        (prfaas_cli.main, ["gateway"], "prfaas gateway: error: the following arguments are required: -c/--config"),
        (planner_cli.main, ["simulate", "-c", "x", "--laod=1"], "--laod=1 (did you mean '--load'?)"),
        (planner_cli.main, ["slove"], "(did you mean 'solve'?)"),
    ],
)
def test_what_is_wrong_is_said_first_and_what_was_meant(main, argv, said, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out, err = capsys.readouterr()
    assert (ended.value.code, out, len(err.splitlines())) == (2, "", 2)
    assert said in err
    assert err.splitlines()[1].endswith(" --help shows all arguments.")
