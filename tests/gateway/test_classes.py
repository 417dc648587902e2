"""A request is of the class that its header names, or that its key stands for; nobody takes a class that is another's."""

from hashlib import sha256
from math import inf

import pytest

from gateway.classes import AdmissionConfig, ClassConfig, Classes, check_classes
from gateway.errors import ApiError
from planner.decisions.admission import AdmissionPolicy
from planner.decisions.classes import ServiceClass
from transport.control.settings import SettingsError

KEY = "sk-interactive"
CONFIGS = {
    "interactive": ClassConfig(ttft_s=2.0, tbt_ms=50, priority=10, keys=(sha256(KEY.encode()).hexdigest(),)),
    "batch": ClassConfig(priority=-5, deadline_s=600.0),
}
CLASSES = Classes(CONFIGS)


def test_without_a_word_it_is_the_default_class() -> None:
    assert Classes().of({}) == ServiceClass(name="default", ttft_s=inf, tbt_s=inf, priority=0, deadline_s=inf)
    assert CLASSES.of({"Authorization": "Bearer sk-of-nobody"}).name == "default"
    assert CLASSES.of({"Authorization": "Basic abc"}).name == "default"
    assert Classes(CONFIGS, "batch").of({}).name == "batch"


def test_a_header_names_a_class() -> None:
    assert CLASSES.of({"x-prfaas-class": "batch"}) == ServiceClass(name="batch", priority=-5, deadline_s=600.0)
    assert CLASSES.of({"x-prfaas-class": "default"}).name == "default"


def test_a_key_stands_for_a_class() -> None:
    found = CLASSES.of({"Authorization": f"Bearer {KEY}"})
    assert found == ServiceClass(name="interactive", ttft_s=2.0, tbt_s=0.05, priority=10)
    assert CLASSES.of({"Authorization": f"Bearer {KEY}", "x-prfaas-class": "interactive"}) is found
    assert CLASSES.of({"x-api-key": KEY}) is CLASSES.of({"Authorization": f"bearer {KEY}"}) is found
    assert CLASSES.of({"Authorization": f"Bearer {KEY}", "x-prfaas-class": "batch"}).name == "batch"


@pytest.mark.parametrize("name", ["bulk", "", "a b", "batch\n", "x" * 10_000, "ünï"])
def test_an_unknown_name_is_a_mistake_that_names_the_known_ones(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        CLASSES.of({"x-prfaas-class": name})
    assert (refused.value.status, refused.value.code) == (400, "unknown_class")
    assert refused.value.message.endswith("known are batch, default, interactive.")


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer sk-of-nobody", f"bearer{KEY}"])
def test_a_class_with_keys_is_not_for_others(key: str) -> None:
    with pytest.raises(ApiError) as refused:
        CLASSES.of({"x-prfaas-class": "interactive", "Authorization": key})
    assert (refused.value.status, refused.value.code) == (403, "class_not_allowed")


def test_a_key_is_of_one_class() -> None:
    key = sha256(b"a").hexdigest()
    with pytest.raises(SettingsError, match="each key in one class"):
        check_classes({"a": ClassConfig(keys=(key,)), "b": ClassConfig(keys=(key,))}, "default")


def test_load_is_predicted_unless_the_file_says_otherwise() -> None:
    assert AdmissionConfig().policy is AdmissionPolicy.PREDICTION
