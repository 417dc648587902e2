"""Whatever is spoiled in what the planner reads, it is told: no traceback, and no result that is no number."""

import gzip
import lzma
import random

import pytest

from planner.commands.cli import main
from tests.planner.commands.inputs import PROFILE, ROWS, SESSIONS, SITE, WORST, jsonl, spoiled, written

FUZZ_CASES = 300


def spoiled_bytes(rng, data):
    match rng.randrange(4):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:
            at = rng.randrange(len(data))
            return data[:at] + rng.randbytes(3) + data[at + 3 :]
        case 2:
            return rng.choice([gzip.compress, lzma.compress])(data)[: rng.randrange(1, len(data))]
        case _:
            return data


def anything(rng, folder):
    """A command with one of its inputs spoiled."""
    site, profile = SITE, PROFILE
    if rng.random() < 0.7:  # much faster to solve
        lengths = {"kind": "lengths", "tokens": [100, 2000, 40_000], "output_tokens": 100, "slices": []}
        site = site | {"workload": lengths}
    rows, extra = rng.choice([ROWS, SESSIONS]), []
    command = rng.choice(["solve", "simulate", "fit", "whatif", "profile"])
    match rng.randrange(4):
        case 0:
            site = spoiled(rng, site, [each for each in WORST if each is not None and each != [None]])
        case 1:
            profile = spoiled(rng, profile)
        case 2:
            command = rng.choice(["fit", "simulate"])
            rows = spoiled(rng, rows)
        case _:
            value = rng.choice(["nan", "inf", "-1", "0", "1e-300", "1e300", "", "x", "1:2", "0.5,nan", "9" * 400])
            options = {
                "profile": ["--hardware"],
                "solve": ["--rate", "--spread", "--bins", "--deployment"],
                "simulate": [
                    "--seed",
                    "--load",
                    "--day",
                    "--cache-gb",
                    "--increment",
                    "--tail-share",
                    "--tick",
                    "--ttft",
                    "--link-down",
                    "--begin-within",
                    "--fetch-gbps",
                ],
                "fit": ["--cache-gb", "--span", "--begin-within"],
                "whatif": ["--sweep"],
            }[command]
            option = rng.choice(options)
            extra = [f"{option}={rng.choice(['n_pd=', 'decode_rate=', '']) if option == '--sweep' else ''}{value}"]
    config = written(folder, site, profile)
    trace = folder / rng.choice(["t.jsonl", "t.csv", "requests-1.jsonl"])
    trace.write_bytes(spoiled_bytes(rng, jsonl(rows if isinstance(rows, list) else [rows]).encode()))
    match command:
        case "fit":
            return ["fit", "--trace", str(trace), *rng.choice([[], ["-c", str(config)]]), *extra]
        case "profile":
            return ["profile", rng.choice(["show", "check"]), str(folder / "profile.json"), *extra]
        case "simulate":
            requests = rng.choice([["--requests", "20"], ["--trace", str(trace)], ["--trace", str(trace), "--ideal"]])
            return ["simulate", "-c", str(config), *requests, *extra]
        case "solve":
            return ["solve", "-c", str(config), *rng.choice([[], ["--robust"], ["--objective", "slo"]]), *extra]
        case _:
            return ["whatif", "-c", str(config), *(extra or ["--sweep", "b_out=1,2"])]


@pytest.mark.rotating
@pytest.mark.dimensions(first=None)
@pytest.mark.parametrize("first", range(0, FUZZ_CASES, 30))
def test_whatever_is_wrong_is_told(capsys, tmp_path, first):
    """Seeded: number n is the same each time. Warnings of NumPy are errors here."""
    for seed in range(first, first + 30):
        folder = tmp_path / str(seed)
        folder.mkdir()
        args = anything(random.Random(seed), folder)
        try:
            code = main(args)
        except SystemExit as end:
            code = end.code
        except Exception as error:
            raise AssertionError(f"number {seed}: prfaas-plan {' '.join(args)}") from error
        out, err = capsys.readouterr()
        assert code in (0, 1, 2, 3), f"number {seed}: {args}"
        assert code == 0 or "error: " in err or "infeasible: " in err, f"number {seed}: {args}: {err}"
        assert "nan" not in out.lower(), f"number {seed}: {args}: {out}"
