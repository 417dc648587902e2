"""What a server's manager does when something of SGLang's around it fails. Without servers and agents."""

import threading
from collections import OrderedDict

import pytest

pytest.importorskip("sglang")

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("default")]  # what its import warns of is not ours to mend

ROOM = 7


@pytest.fixture
def prefill():
    """A prefill server's manager, with only what a request needs once its pages have been sent."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    from engine.sglang.disaggregation.disaggregation import PrfaasKVManager
    from engine.sglang.disaggregation.rendezvous import Offer

    manager = object.__new__(PrfaasKVManager)
    offer = Offer(room=ROOM, endpoint="127.0.0.1", dst_port=1, num_pages=0, decode_prefix_len=0, ticket=None)
    vars(manager).update(
        request_status={ROOM: KVPoll.Transferring}, transfer_infos={ROOM: {"127.0.0.1": offer}}, failure_records={},
        failure_lock=threading.Lock(), attn_tp_rank=0, pp_size=1, pp_rank=0, attn_cp_size=1, attn_cp_rank=0,
        _rooms=threading.RLock(), _handoffs={}, _aux_index={ROOM: 0}, _aux=(), _parts={}, _aborted=OrderedDict(),
        _early=OrderedDict(),
        req_to_decode_prefix_len={}, _deferred_ack_targets={}, _deferred_ack_poisoned_rooms=set(), _staging_outstanding={},
    )  # fmt: skip
    return manager


def test_a_request_ends_though_its_decode_server_cannot_be_told(prefill):
    """Nothing else would end it: SGLang has no timeout for a request that is sent, and keeps its pages until its end."""
    import zmq
    from sglang.srt.disaggregation.base.conn import KVPoll

    def send(*_, **__):
        raise zmq.Again

    prefill._send_multipart_locked = send
    prefill._sent(ROOM, "")
    assert prefill.request_status[ROOM] == KVPoll.Failed
    assert "127.0.0.1:1" in prefill.failure_records[ROOM]


def offered(manager, room):
    from engine.sglang.disaggregation.rendezvous import Offer, offer_frames

    offer = Offer(room=room, endpoint="127.0.0.1", dst_port=1, num_pages=0, decode_prefix_len=3, ticket=None)
    manager._hear_from_decode(offer_frames(offer))


def kept_of(manager):
    """Rooms that have entries."""
    tables = (manager.request_status, manager.transfer_infos, manager.req_to_decode_prefix_len, manager.failure_records)
    return set().union(*tables) - {ROOM}


def test_offers_for_requests_that_never_come_are_forgotten(prefill):
    """Prefill has refused such a request, and decode ends it after its own time."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    prefill.max_early = 4
    for room in range(10, 14):
        offered(prefill, room)
    prefill._abort(10)
    assert kept_of(prefill) == {11, 12, 13}
    prefill.fail_if_aborted(11)  # its request is here
    for room in range(20, 30):
        offered(prefill, room)
    assert kept_of(prefill) == {11, 26, 27, 28, 29}
    assert prefill.request_status[11] == KVPoll.WaitingForInput
    assert 11 in prefill.transfer_infos


def test_a_request_whose_offer_was_taken_back_fails_when_it_comes(prefill):
    from sglang.srt.disaggregation.base.conn import KVPoll

    offered(prefill, 10)
    prefill._abort(10)
    offered(prefill, 10)  # it crossed with the abort
    assert kept_of(prefill) == set()
    prefill.update_status(10, KVPoll.Bootstrapping)
    prefill.fail_if_aborted(10)
    assert prefill.request_status[10] == KVPoll.Failed


def test_an_offer_that_crosses_with_the_end_of_its_request_leaves_nothing(prefill):
    """The scheduler's thread clears the room while the other one hears the offer."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    from engine.sglang.disaggregation.disaggregation import PrfaasKVSender

    sender = object.__new__(PrfaasKVSender)
    vars(sender).update(kv_mgr=prefill, bootstrap_room=10, conclude_state=KVPoll.Failed)
    vars(prefill).update(deferred_bootstrap=None, _staging_ctx=None, forget=lambda room: None)  # that far it has come
    clearing = threading.Thread(target=sender.clear)

    class Crossing(dict):
        def __contains__(self, room):
            found = super().__contains__(room)
            if found and room == 10 and clearing.ident is None:
                clearing.start()
                clearing.join(0.2)
            return found

    prefill.request_status = Crossing(prefill.request_status | {10: KVPoll.Bootstrapping})
    offered(prefill, 10)
    clearing.join()
    assert kept_of(prefill) == set()
