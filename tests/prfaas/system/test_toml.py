import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.system.toml import dump_toml

values = st.one_of(
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
)
keys = st.text(st.sampled_from("abc_-9 é."), min_size=1, max_size=5)


@given(
    st.dictionaries(
        keys, st.one_of(values, st.lists(values, max_size=3), st.dictionaries(keys, values, min_size=1, max_size=3))
    )
)
def test_what_is_written_reads_back(document: dict[str, object]) -> None:
    assert tomllib.loads(dump_toml(document)) == document


def test_arrays_of_tables() -> None:
    document = {"gateway": {"port": 1, "nodes": [{"agent": "a:1"}, {"agent": "b:2"}]}}
    assert tomllib.loads(dump_toml(document)) == document


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        dump_toml({"key": None})
