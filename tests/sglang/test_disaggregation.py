"""What a server's manager does when something of SGLang's around it fails. Without servers and agents."""

import threading

import pytest

pytest.importorskip("sglang")

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("default")]  # what its import warns of is not ours to mend

ROOM = 7


@pytest.fixture
def prefill():
    """A prefill server's manager, of which no more is there than a request needs whose pages have been sent."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    from engine.sglang.disaggregation import PrfaasKVManager
    from engine.sglang.rendezvous import Offer

    manager = object.__new__(PrfaasKVManager)
    offer = Offer(room=ROOM, endpoint="127.0.0.1", dst_port=1, num_pages=0, decode_prefix_len=0, ticket=None)
    vars(manager).update(
        request_status={ROOM: KVPoll.Transferring}, transfer_infos={ROOM: {"127.0.0.1": offer}}, failure_records={},
        failure_lock=threading.Lock(), attn_tp_rank=0, pp_size=1, pp_rank=0, attn_cp_size=1, attn_cp_rank=0,
        _rooms=threading.RLock(), _handoffs={}, _aux_index={ROOM: 0}, _aux=(), _parts={},
    )  # fmt: skip
    return manager


def test_a_request_ends_though_its_decode_server_cannot_be_told(prefill):
    """Nobody else would end it: SGLang counts no time of a request that is sent, and keeps its pages until it has ended."""
    import zmq
    from sglang.srt.disaggregation.base.conn import KVPoll

    def send(*_, **__):
        raise zmq.Again

    prefill._send_multipart_locked = send
    prefill._sent(ROOM, "")
    assert prefill.request_status[ROOM] == KVPoll.Failed
    assert "127.0.0.1:1" in prefill.failure_records[ROOM]
