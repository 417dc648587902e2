"""What an InferencePool chooses."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from membership.errors import KubernetesFailed
from membership.kubernetes.objects import InferencePool
from membership.kubernetes.pools import PoolChoice, choice_of


def pool(labels: Mapping[str, str] | None, ports: Sequence[int]) -> InferencePool:
    """As the API server tells it, with fields that are not looked at."""
    spec = {
        "selector": {"matchLabels": labels} if labels is not None else {},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    }
    told = {"kind": "InferencePool", "metadata": {"name": "vllm", "namespace": "llm"}, "spec": spec, "status": {}}
    return msgspec.json.decode(msgspec.json.encode(told), type=InferencePool)


def test_labels_become_a_selector_whatever_their_order() -> None:
    chosen = PoolChoice("app=vllm,model=m", (8000,))
    assert choice_of(pool({"model": "m", "app": "vllm"}, [8000])) == chosen
    assert choice_of(pool({"app": "vllm", "model": "m"}, [8000])) == chosen


def test_each_target_port_is_one_of_every_pod() -> None:
    assert choice_of(pool({"app": "vllm"}, [8000, 8001])).ports == (8000, 8001)


@pytest.mark.parametrize("labels", [None, {}, {"app": "v" * 1025}])
def test_a_pool_that_chooses_all_pods_of_a_namespace_is_refused(labels: Mapping[str, str] | None) -> None:
    with pytest.raises(KubernetesFailed, match=r"InferencePool llm/vllm: matchLabels: ") as failed:
        choice_of(pool(labels, [8000]))
    assert failed.value.reason == "malformed"


@pytest.mark.parametrize("ports", [[], [0], [65536], range(8000, 8009)])
def test_ports_that_are_none_are_refused(ports: Sequence[int]) -> None:
    with pytest.raises(KubernetesFailed, match=r"InferencePool llm/vllm: targetPorts: must be 1 to 8 ports"):
        choice_of(pool({"app": "vllm"}, ports))
