"""Which model a node is of, and what is wrong with tables of models."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.gateway import GatewayConfig, NodeAddress, load
from gateway.config.models import MOST_MODELS, REST, ModelCatalog, ModelTable
from gateway.errors import GatewayConfigError
from gateway.models.served import config_of

NODE = NodeAddress(agent="127.0.0.1:1")
FILE = """
[gateway]
{gateway}
[[gateway.models]]
name = "coder"
{table}
[[gateway.nodes]]
agent = "127.0.0.1:7001"
"""


ANOTHER = """
[[gateway.models]]
name = "a"
nodes = ["b"]
tokenizer_dir = "a"
"""


def read(tmp_path: Path, gateway: str = "", table: str = 'tokenizer_dir = "c"') -> GatewayConfig:
    file = tmp_path / "gateway.toml"
    file.write_text(FILE.format(gateway=gateway, table=table))
    return load(file)


def test_a_gateway_without_tables_has_one_model_for_all_nodes() -> None:
    config = GatewayConfig(tokenizer_dir=Path("t"), nodes=(NODE,), served_model="chat")
    assert config.catalog.is_single
    assert {config.catalog.of_node(name) for name in ("chat", "coder", "")} == {REST}
    assert config.catalog.shown(REST) == "chat"
    assert config_of(config, config.catalog, REST, 4) == config


def test_a_table_takes_the_nodes_that_it_names_and_the_rest_stay(tmp_path: Path) -> None:
    config = read(tmp_path, 'tokenizer_dir = "t"\nthreshold_tokens = 5', 'tokenizer_dir = "c"\nnodes = ["a", "b"]')
    catalog = config.catalog
    assert [catalog.of_node(name) for name in ("a", "b", "coder", "x")] == ["coder", "coder", REST, REST]
    own = config_of(config, catalog, "coder", 4)
    assert (own.tokenizer_dir, own.served_model, own.threshold_tokens, own.models) == (tmp_path / "c", "coder", 5, ())
    assert own.max_waiting == config.max_waiting // 4
    assert config_of(config, catalog, REST, 4).max_waiting == config.max_waiting


def test_tables_alone_leave_other_nodes_out_and_the_first_or_a_named_one_is_the_default(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.catalog.default, config.catalog.of_node("x")) == ("coder", None)
    more = (*config.models, ModelTable(name="chat", tokenizer_dir=Path("t")))
    assert replace(config, models=more).catalog.default == "coder"
    assert replace(config, models=more, default_model="chat").catalog.default == "chat"


@pytest.mark.parametrize(
    ("gateway", "table", "message"),
    [
        ("", "", "'coder' has no tokenizer_dir"),
        ("", 'tokenizer_dir = "c"\nthreshold_tokens = -1', "threshold_tokens = -1.0: must be a number of at least 0"),
        ("", 'tokenizer_dir = "c"\naliases = [""]', "nodes and aliases = '': must be names"),
        ('tokenizer_dir = "t"\nserved_model = "coder"', 'tokenizer_dir = "c"', "each name with one model"),
        ('default_model = "chat"', 'tokenizer_dir = "c"', "default_model = 'chat': must be one of coder"),
        ("", 'tokenizer_dir = "c"\nnodes = ["a"]' + ANOTHER, "models = ['a']: must be each name with one model"),
        ("", 'tokenizer_dir = "c"\naliases = ["b"]' + ANOTHER, "models = ['b']: must be each name with one model"),
        ("model_grace_s = -1", 'tokenizer_dir = "c"', "model_grace_s = -1.0"),
        ("", 'tokenizer_dir = "c"\ntokeniser_dir = "c"', "unknown key 'tokeniser_dir'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, gateway: str, table: str, message: str) -> None:
    with pytest.raises(GatewayConfigError) as wrong:
        read(tmp_path, gateway, table)
    assert message in str(wrong.value)


def test_a_file_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[gateway]\n[[gateway.nodes]]\nagent = "127.0.0.1:7001"\n')
    with pytest.raises(GatewayConfigError, match="missing: tokenizer_dir"):
        load(file)


@given(st.sets(st.text("abcdef", min_size=1, max_size=3), max_size=2 * MOST_MODELS))
def test_models_that_nodes_bring_come_after_those_of_the_file_and_have_their_nodes(names: set[str]) -> None:
    catalog = ModelCatalog((ModelTable(name=REST), ModelTable(name="a", nodes=("bb",))))
    found = catalog.with_found(names)
    assert found.models[:2] == catalog.models
    assert len(found.models) <= MOST_MODELS
    for each in found.models[2:]:
        assert found.of_node(each.name) == each.name or each.name == "bb"
    assert len({each.name for each in found.models}) == len(found.models)
