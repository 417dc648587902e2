"""A site, its profile and a trace, as tables to spoil and as files."""

import json
import tomllib
from pathlib import Path

CONFIGS = Path("configs").resolve()
PROFILE = json.loads((CONFIGS / "profiles/internal-1t.json").read_text())
SITE = tomllib.loads((CONFIGS / "case_study.toml").read_text())
ROWS = [
    {"timestamp": 1000 * at, "input_length": 1000 + 10 * at, "output_length": 50, "hash_ids": [3 * at, 3 * at + 1]}
    for at in range(40)
]
SESSIONS = [
    {"session": f"{at // 4}", "t": 9.0 * (at % 4), "input_length": 700 + at, "output_length": 9, "blocks": [[0, 10]]}
    for at in range(12)
]

WORST = (
    float("nan"), float("inf"), -float("inf"), -1, 0, 1e-300, 1e300, 10**400, 0.5, True, "", "x", None, [], {}, [[]], [None],
    "\0", 1e9, 10**12, "9" * 5000,
)  # fmt: skip


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def toml(value):
    """TOML of one value."""
    match value:
        case dict():
            return "{ " + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(toml, value)) + "]"
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value)
        case _:
            return repr(value)


def written(folder, site=SITE, profile=PROFILE):
    (folder / "profile.json").write_text(json.dumps(profile))
    if "profile" in site:
        site = site | {"profile": str(folder / "profile.json")}
    (folder / "site.toml").write_text("".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value in site.items()))
    return folder / "site.toml"


def places(value, path=()):
    """Where something is in nested tables and arrays."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from places(each, (*path, key))


def spoiled(rng, table, worst=WORST):
    """A copy of `table` in which something is another value, is not there, or is called otherwise."""
    copy = json.loads(json.dumps(table))
    *way, last = rng.choice(list(places(copy)))
    inside = copy
    for key in way:
        inside = inside[key]
    match rng.randrange(6):
        case 0:
            del inside[last]
        case 1 if isinstance(inside, dict):
            inside[f"{last}s"] = inside.pop(last)
        case 2 if isinstance(inside, list):
            inside.append(inside[last])
        case _:
            inside[last] = rng.choice(worst)
    return copy
