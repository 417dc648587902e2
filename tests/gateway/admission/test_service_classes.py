"""A request is of the class that its header names, or that its key stands for; no key takes another's class."""

import json
from hashlib import sha256
from math import inf

import pytest

from gateway.admission.service_classes import Classes
from gateway.config.classes import AdmissionConfig, ClassConfig, check_classes
from gateway.config.tenants import TenantConfig
from gateway.errors import ApiError
from planner.decisions.admission.classes import ServiceClass
from planner.decisions.admission.overload import AdmissionPolicy
from tests.gateway.memory.pipeline import on_memory_loop, pipeline
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


def test_a_tenants_classes_are_granted_without_their_keys_and_no_others_are() -> None:
    granted = ("interactive", "default")
    assert CLASSES.of({}, granted).name == "interactive"
    for name in granted:
        assert CLASSES.of({"x-prfaas-class": name}, granted).name == name
    with pytest.raises(ApiError, match="choose interactive or default") as refused:
        CLASSES.of({"x-prfaas-class": "batch"}, granted)
    assert (refused.value.status, refused.value.code) == (403, "class_not_allowed")


def test_a_class_of_a_key_goes_before_the_tenants() -> None:
    shown = {"Authorization": f"Bearer {KEY}"}
    assert CLASSES.of(shown, ("batch",)).name == "interactive"
    assert CLASSES.of(shown | {"x-prfaas-class": "interactive"}, ("batch",)).name == "interactive"


def test_a_class_that_a_reload_took_away_is_nobodys() -> None:
    assert Classes().of({}, ("batch",)).name == "default"


@on_memory_loop
async def test_a_request_is_of_its_tenants_class() -> None:
    tenants = {"acme": TenantConfig(keys=(sha256(b"sk-acme").hexdigest(),), classes=("batch",))}
    operators = (sha256(b"sk-operator").hexdigest(),)
    async with pipeline(tenants=tenants, classes=CONFIGS, operator_keys=operators) as w:
        shown = {"Authorization": "Bearer sk-acme"}
        assert (await w.complete("one two", headers=shown)).status == 200
        assert (await w.complete("one two", headers=shown | {"x-prfaas-class": "default"})).status == 403
        await w.idle()
        shown = {"Authorization": "Bearer sk-operator"}
        async with w.http.get("/prfaas/requests", headers=shown) as lines:
            records = [json.loads(line) async for line in lines.content]
        assert [record["service_class"] for record in records] == ["batch"]


def test_a_key_is_of_one_class() -> None:
    key = sha256(b"a").hexdigest()
    with pytest.raises(SettingsError, match="each key in one class"):
        check_classes({"a": ClassConfig(keys=(key,)), "b": ClassConfig(keys=(key,))}, "default")


def test_load_is_predicted_unless_the_file_says_otherwise() -> None:
    assert AdmissionConfig().policy is AdmissionPolicy.PREDICTION
