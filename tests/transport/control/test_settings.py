"""One reader for all files: what a table may say, and how it is told what is wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from transport.control.settings import (
    MAX_FILE_BYTES,
    SettingsError,
    build,
    in_file,
    mapped,
    read_toml,
    require_one_of,
    require_range,
    require_tables,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    width_m: float = 1.0
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        require_range("width_m", self.width_m, 0.5, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    street: str
    rooms: int = 4
    sold: bool = False
    plan: Path | None = None
    door: Door = field(default_factory=Door)
    sheds: tuple[Door, ...] = ()
    gates: Mapping[str, Door] = field(default_factory=dict)
    owners: tuple[str, ...] = ()
    number: int | str = 1
    prices: float | Mapping[str, Any] = 0.0
    kind: str = "brick"

    def __post_init__(self) -> None:
        require_one_of("kind", self.kind, ("brick", "wood"))


def test_a_table_becomes_a_value() -> None:
    table = {
        "street": "Long",
        "rooms": 3,
        "plan": "plans/a.pdf",
        "door": {"width_m": 2, "colour": "blue"},
        "sheds": [{}, {"width_m": 0.5}],
        "gates": {"north": {"colour": "blue"}, "south": {}},
        "owners": ["a", "b"],
        "number": "7b",
        "prices": {"may": 1},
    }
    assert build(House, table, "[house]", Path("/maps")) == House(
        street="Long",
        rooms=3,
        plan=Path("/maps/plans/a.pdf"),
        door=Door(width_m=2.0, colour=Colour.BLUE),
        sheds=(Door(), Door(width_m=0.5)),
        gates={"north": Door(colour=Colour.BLUE), "south": Door()},
        owners=("a", "b"),
        number="7b",
        prices={"may": 1},
    )
    assert isinstance(build(House, {"street": "x", "prices": 1}, "").prices, float)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"romms": 1}, "[house]: unknown key 'romms' (did you mean 'rooms'?); known are door, gates, kind, "),
        ({"zzz": 1}, "[house]: unknown key 'zzz'; known are door"),
        ({"rooms": "4"}, "[house]: rooms = '4': must be an integer"),
        ({"rooms": True}, "[house]: rooms = True: must be an integer"),
        ({"rooms": 1.5}, "[house]: rooms = 1.5: must be an integer"),
        ({"sold": 1}, "[house]: sold = 1: must be true or false"),
        ({"plan": 3}, "[house]: plan = 3: must be a path"),
        ({"kind": "tin"}, "[house]: kind = 'tin': must be 'brick' or 'wood'"),
        ({"door": 3}, "[house.door] = 3: must be a table"),
        ({"door": {"width_m": 3}}, "[house.door]: width_m = 3.0: must be 0.5 to 2.0"),
        ({"door": {"colour": "green"}}, "[house.door]: colour = 'green': must be 'red' or 'blue'"),
        ({"door": {"colour": ["red"]}}, "[house.door]: colour = ['red']: must be 'red' or 'blue'"),
        ({"sheds": {}}, "[house]: sheds = {}: must be an array"),
        ({"sheds": [{}, {"width": 1}]}, "[house.sheds[1]]: unknown key 'width' (did you mean 'width_m'?)"),
        ({"gates": [{}]}, "[house.gates] = [{}]: must be a table"),
        ({"gates": {"north": {"width": 1}}}, "[house.gates.north]: unknown key 'width' (did you mean 'width_m'?)"),
        ({"owners": ["a", 1]}, "[house]: owners[1] = 1: must be a string"),
        ({"number": 1.5}, "[house]: number = 1.5: must be an integer or a string"),
        ({"prices": "x" * 200}, f"[house]: prices = '{'x' * 76}...: must be a number or a table"),
    ],
)
def test_place_key_value_and_what_is_allowed_are_said(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build(House, {"street": "Long"} | change, "[house]")
    assert str(caught.value).startswith(says)


def test_what_is_missing_is_said() -> None:
    with pytest.raises(SettingsError, match=r"^houses\[2\]: missing: street$"):
        build(House, {}, "houses[2]")
    with pytest.raises(SettingsError, match=r"^clusters = 3: must be an array of tables$"):
        require_tables(3, "clusters")


def test_the_file_is_named_and_the_error_is_the_callers(tmp_path: Path) -> None:
    class OwnError(Exception):
        pass

    path = tmp_path / "house.toml"
    invalid = ["[house", "a = '\x00'", "a = " + "[" * 5000 + "]" * 5000, "a = " + "9" * 5000]
    for text, says in [(None, "no such file"), *((each, "not valid TOML: ") for each in invalid)]:
        if text is not None:
            path.write_text(text)
        with pytest.raises(OwnError, match=f"^{path}: {says}"), in_file(path, OwnError):
            read_toml(path)
    path.write_text("street = 'Long'")
    assert read_toml(path) == {"street": "Long"}
    path.write_text("street = 'Long' #" + "x" * MAX_FILE_BYTES)
    with pytest.raises(OwnError, match=f"^{path}: longer than 1048576 bytes"), in_file(path, OwnError):
        read_toml(path)
    with pytest.raises(SettingsError, match="longer than"):
        read_toml(Path("/dev/zero"))
    with pytest.raises(OwnError, match=r"^x$"), mapped(OwnError):
        raise SettingsError("x")
