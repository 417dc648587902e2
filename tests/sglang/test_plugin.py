"""SGLang's own hooks with our plugin: another backend beside those that it knows."""

import subprocess
import sys

import pytest

from tests.sglang.serving import kernels_stood_in

pytest.importorskip("sglang")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

# In a process of its own: hooks are for good.
PROGRAM = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer
from sglang.srt.disaggregation.prefill import TransferBackend, get_kv_class
from sglang.srt.disaggregation.utils import KVClassType
assert "prfaas" in DISAGG_TRANSFER_BACKEND_CHOICES
ours = {kind.value: get_kv_class(TransferBackend("prfaas"), kind) for kind in KVClassType}
assert {name: each.__name__ for name, each in ours.items()} == {
    "kvargs": "KVArgs", "manager": "PrfaasKVManager", "sender": "PrfaasKVSender", "receiver": "PrfaasKVReceiver",
    "bootstrap_server": "CommonKVBootstrapServer",
}, ours
assert not ours["manager"].__abstractmethods__ | ours["sender"].__abstractmethods__ | ours["receiver"].__abstractmethods__
assert get_kv_class(TransferBackend.FAKE, KVClassType.MANAGER).__name__ == "FakeKVManager"
assert TransferBackend("mooncake") is TransferBackend.MOONCAKE
"""


def test_the_entry_point_adds_our_backend_and_changes_no_other():
    with kernels_stood_in():
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
