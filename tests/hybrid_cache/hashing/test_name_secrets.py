"""Secrets that names of blocks follow from: equal ones give equal names, and nothing else tells anything of them."""

import secrets
from pathlib import Path

import pytest

from hybrid_cache.hashing.block_hash import block_hashes, model_salt
from hybrid_cache.hashing.name_secrets import NONE, UNKEYED, NameSecrets

NEW, OLD = "a1" * 32, "b2" * 32
TOKENS = list(range(1000))


def names(secret: NameSecrets, which: int = 0) -> list[bytes]:
    return block_hashes(TOKENS, 64, secret.model_salts("layout")[which])


def test_without_a_secret_names_are_those_that_they_always_were() -> None:
    assert UNKEYED.model_salts("layout") == (model_salt("layout"),)
    assert UNKEYED.namespace_keys() == (b"",)
    assert NameSecrets.of(NONE) == UNKEYED


def test_equal_secrets_give_equal_names_and_others_others() -> None:
    assert names(NameSecrets.of(NEW)) == names(NameSecrets.of(f"# made today\n\n  {NEW.upper()}\n"))
    assert not set(names(NameSecrets.of(NEW))) & set(names(NameSecrets.of(OLD)))
    assert not set(names(NameSecrets.of(NEW))) & set(names(UNKEYED))


def test_what_was_named_before_a_rotation_has_its_names_by_the_second_line() -> None:
    both = NameSecrets.of(f"{NEW}\n{OLD}\n")
    assert names(both, 0) == names(NameSecrets.of(NEW))
    assert names(both, 1) == names(NameSecrets.of(OLD))
    assert names(NameSecrets.of(f"{NEW}\n{NONE}"), 1) == names(UNKEYED)  # the first secret of all is a rotation, too


def test_a_line_may_end_with_a_comment() -> None:
    assert NameSecrets.of(f"{NEW}  # names what is new\n{OLD}# is still looked for") == NameSecrets.of(f"{NEW}\n{OLD}")


def test_fingerprints_compare_and_are_neither_salts_nor_keys() -> None:
    both = NameSecrets.of(f"{NEW}\n{OLD}\n")
    assert both.fingerprints == (*NameSecrets.of(NEW).fingerprints, *NameSecrets.of(OLD).fingerprints)
    derived = {*both.model_salts("layout"), *both.namespace_keys()}
    assert len(derived) == 4
    assert not any(bytes.fromhex(each) in whole for each in both.fingerprints for whole in derived)
    assert UNKEYED.fingerprints == (NONE,)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 secrets"),
        ("# nothing\n", "0 secrets"),
        (f"{NEW}\n{OLD}\n{'c3' * 32}", "3 secrets"),
        (f"{NEW}\n{NEW}", "twice"),
        ("a1" * 31, "64 hexadecimal digits"),
        ("a1" * 33, "64 hexadecimal digits"),
        ("zz" * 32, "64 hexadecimal digits"),
        ("correct horse battery staple", "64 hexadecimal digits"),
    ],
)
def test_what_is_no_secret_is_refused_without_being_shown(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refusal:
        NameSecrets.of(text)
    assert not text or text.split()[0] not in str(refusal.value)


def test_a_secret_ends_where_chains_begin() -> None:
    """A salt by a secret is as long as one without, and from there on all is the same: so is the cost of a prompt."""
    keyed, plain = NameSecrets.of(NEW).model_salts("layout")[0], model_salt("layout")
    assert len(keyed) == len(plain) == 32
    parent = names(NameSecrets.of(NEW))[0]
    assert block_hashes(TOKENS[64:], 64, plain, parent) == names(NameSecrets.of(NEW))[1:]


def test_who_knows_model_prompt_and_salt_and_not_the_secret_does_not_know_the_name(tmp_path: Path) -> None:
    """What a stranger can compute of a guessed prompt is not what leaves a node."""
    guessed = {name for salt in (model_salt("layout"), b"layout", b"") for name in block_hashes(TOKENS, 64, salt)}
    file = tmp_path / "names.secret"
    file.write_text(secrets.token_hex(32))
    assert not guessed & set(names(NameSecrets.of(file.read_text())))
