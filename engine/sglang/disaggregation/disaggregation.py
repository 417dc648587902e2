"""SGLang's classes for disaggregated prefill and decode, over the agents of two nodes.

    router ── one request, one room ──► prefill server, decode server
    decode   reserves pages at its agent ── Offer with a ticket ──► prefill
    prefill  computes, copies chunks of pages into its agent's ══ push ══► decode's agent ──► decode's pages
    prefill  ── auxiliary data, status ──► decode

Rooms, the bootstrap server, timeouts of requests and health of prefill servers are SGLang's own (`common.conn`). Settings come
from the environment, as SGLang has no others for its backends: PRFAAS_AGENT_SOCKET, and for decode PRFAAS_AGENT_CONTROL.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import numpy as np
import sglang
import zmq
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    AbortNotification,
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_device, get_parallel
from sglang.srt.utils.network import NetworkAddress

from engine.errors import PagesInvalid
from engine.sglang.agent_thread import SglangAgentThread
from engine.sglang.control import AgentControl
from engine.sglang.disaggregation.buffers import PageBuffers, read_item, write_item
from engine.sglang.disaggregation.handoff import PageChunk, ReceivingHandoff, SendingHandoff
from engine.sglang.disaggregation.pools import Buffer, Pools, layout_of, refusal_of
from engine.sglang.disaggregation.rendezvous import (
    AUXILIARY,
    OFFER,
    STATUS,
    Auxiliary,
    Offer,
    RendezvousError,
    auxiliary_frames,
    offer_frames,
    read_auxiliary,
    read_offer,
)
from engine.sglang.identity import kv_identity
from engine.sglang.settings import CONTROL, REVISION, SOCKET
from engine.sglang.unsupported import not_done_json
from engine.sglang.version import is_tested, untested
from transport.control.messages import BootstrapAddress, TicketInfo
from transport.path.tcp import format_address

log = logging.getLogger(__name__)

ABORTED: Final = "decode has aborted the request"
MAX_ABORTED: Final = 4096  # rooms remembered
MAX_EARLY: Final = (
    16384  # offers for requests that are not here yet; a request whose offer was forgotten ends by SGLang's timeout
)
# Settings that need more of a backend than pages.
UNSUPPORTED: Final = ("enable_hisparse", "enable_pd_role_switch", "enable_kv_cache_sharding")


class PrfaasKVManager(CommonKVManager):  # type: ignore[misc]
    """One server's end: its pages, its agent, and the requests under way."""

    kv_status_msg_tag = STATUS
    max_early = MAX_EARLY
    kv_status_msg_carries_reason = True

    def __init__(
        self,
        args: KVArgs,
        disaggregation_mode: DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:
        """Raises ValueError for a server or settings with which it cannot be used."""
        pools = pools_of(args, server_args)
        if (refusal := refusal_of(pools)) is not None:
            raise ValueError(refusal)
        decodes = disaggregation_mode == DisaggregationMode.DECODE
        socket, control = _setting(SOCKET), _setting(CONTROL) if decodes else ""
        if not server_args.context_length:
            raise ValueError(
                "start the server with --context-length: the node reports the longest prompt that it takes"
            )
        version = str(sglang.__version__)
        notice = "" if is_tested(version) else untested(version)
        if notice:
            log.warning(notice)
        self._handoffs: dict[int, SendingHandoff | ReceivingHandoff] = {}
        self._aux_index: dict[int, int] = {}  # of rooms whose auxiliary data may be written
        self._aborted: OrderedDict[int, None] = OrderedDict()  # rooms that were not asked for here yet
        self._early: OrderedDict[int, None] = OrderedDict()  # rooms with an offer, and no request yet
        self._parts: dict[int, set[str]] = {}  # of a decode's room: what is there already
        self._rooms = threading.RLock()
        self._pages = PageBuffers(pools, get_device().gpu_id)
        self._aux = tuple(
            Buffer(pointer=pointer, num_bytes=length, item_bytes=item)
            for pointer, length, item in zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)
        )
        identity = kv_identity(server_args, version, os.environ.get(REVISION, ""))
        self.agent = SglangAgentThread(
            Path(socket),
            layout_of(identity, pools),
            model_id=server_args.served_model_name or Path(server_args.model_path).name,
            max_model_len=server_args.context_length,
            http_url=f"http://{format_address(server_args.host, server_args.port)}",
            notice=notice,
            not_done_json=not_done_json(),
            rooms=BootstrapAddress()
            if decodes
            else BootstrapAddress(server_args.host, server_args.disaggregation_bootstrap_port),
        )
        self.agent.start()
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if decodes:
            self._reservations = AgentControl(control, self.waiting_timeout)
            self._start_heartbeat_checker_thread()
        threading.Thread(
            target=self._hear_prefill if decodes else self._hear_decode, name="prfaas-rendezvous", daemon=True
        ).start()

    def update_status(self, bootstrap_room: int, status: int) -> None:
        """As SGLang's. Before anybody sees that a room has failed, its pages are no longer touched."""
        if status == KVPoll.Failed:
            self.forget(bootstrap_room)
        super().update_status(bootstrap_room, status)

    def forget(self, room: int) -> None:
        """The room's pages and its item of auxiliary data may be another's when this returns."""
        with self._rooms:
            self._aux_index.pop(room, None)
            self._parts.pop(room, None)
            handoff = self._handoffs.pop(room, None)
        if handoff is not None:
            handoff.give_up()

    def fail(self, room: int, reason: str) -> None:
        """Ends one of our rooms; its request gets the reason."""
        if room in self.request_status:
            self.record_failure(room, reason)
            self.update_status(room, KVPoll.Failed)

    # Prefill

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Any = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """Pages of a request are computed; with the last ones its auxiliary data is."""
        if self.request_status.get(bootstrap_room, KVPoll.Failed) == KVPoll.Failed:
            return
        offer = next(iter(self.transfer_infos.get(bootstrap_room, {}).values()), None)
        if offer is None:
            return
        if index_slice.stop > offer.num_pages or (is_last_chunk and index_slice.stop != offer.num_pages):
            self.conclude_failure(
                bootstrap_room=bootstrap_room,
                failure_reason=f"pages up to {index_slice.stop} of {offer.num_pages} that decode has room for",
            )
            return
        self.update_status(bootstrap_room, KVPoll.Transferring)
        with self._rooms:
            if is_last_chunk and aux_index is not None:
                self._aux_index[bootstrap_room] = aux_index
            sending = self._handoffs.get(bootstrap_room)
            if sending is None and offer.ticket is not None:
                sending = self._handoffs[bootstrap_room] = SendingHandoff(
                    self.agent,
                    self._pages,
                    f"room-{bootstrap_room}",
                    offer.ticket,
                    lambda reason: self._sent(bootstrap_room, reason),
                )
        if isinstance(sending, SendingHandoff):
            wait = wait_event.synchronize if wait_event is not None else None
            pages = np.array(kv_indices, dtype=np.int32)  # a copy: the scheduler's buffer may be another's soon
            sending.put(PageChunk(index_slice.start, pages, is_last_chunk, wait))
        elif is_last_chunk:
            self._sent(bootstrap_room, "")

    def _sent(self, room: int, reason: str) -> None:
        """All pages are with decode's agent, or never will be."""
        if reason:
            self.conclude_failure(bootstrap_room=room, failure_reason=reason)
            return
        with self._rooms:  # while this is held the room's auxiliary data is not taken from it
            index = self._aux_index.pop(room, None)
            if index is None:
                return
            items = tuple(read_item(buffer, index) for buffer in self._aux)
            self._handoffs.pop(room, None)
        for endpoint, port in self._room_notify_targets(room):
            at = NetworkAddress(endpoint, port)
            try:
                self._send_multipart_locked(at.to_tcp(), auxiliary_frames(Auxiliary(room, items)), is_ipv6=at.is_ipv6)
            except (zmq.ZMQError, ValueError) as exc:
                reason = f"auxiliary data cannot be sent to decode at {endpoint}:{port}: {exc}"
                self.conclude_failure(bootstrap_room=room, failure_reason=reason)
                return
        self.conclude_transfer(bootstrap_room=room, status=KVPoll.Success)

    def _hear_decode(self) -> None:
        while True:
            frames = self.server_socket.recv_multipart()
            try:
                self._hear_from_decode(frames)
            except Exception:  # one broken message must not end all requests
                log.exception("a message of a decode server")

    def _hear_from_decode(self, frames: list[bytes]) -> None:
        if frames[0] == ABORT_TAG:
            abort = AbortNotification.from_zmq(frames)
            if abort is not None:
                self._abort(abort.room)
        elif frames[0] == OFFER:
            offer = read_offer(frames)
            with self._rooms:
                if offer.room in self._aborted:
                    return
                if offer.room not in self.request_status:
                    self._early[offer.room] = None
                    if len(self._early) > self.max_early:
                        self._drop_early(next(iter(self._early)))
                self.transfer_infos[offer.room] = {offer.endpoint: offer}
                self.req_to_decode_prefix_len[offer.room] = offer.decode_prefix_len
                self.update_status(offer.room, KVPoll.WaitingForInput)
        else:
            raise RendezvousError(f"a message {frames[0][:32]!r}")

    def _drop_early(self, room: int) -> None:
        """Nothing of it is kept: its request may never come."""
        del self._early[room]
        for table in (self.request_status, self.transfer_infos, self.req_to_decode_prefix_len):
            table.pop(room, None)

    def _abort(self, room: int) -> None:
        with self._rooms:
            if room in self._early:
                self._drop_early(room)
            if room not in self.request_status:  # its request may still be on its way to us
                self._aborted[room] = None
                if len(self._aborted) > MAX_ABORTED:
                    self._aborted.popitem(last=False)
                return
        if self.request_status.get(room) != KVPoll.Success:
            self.fail(room, ABORTED)

    def fail_if_aborted(self, room: int) -> None:
        """For a room that has just been opened: decode may have ended it before."""
        with self._rooms:
            self._early.pop(room, None)
            if room not in self._aborted:
                return
            del self._aborted[room]
        self.fail(room, ABORTED)

    # Decode

    def land(self, room: int, pages: Any, aux_index: int, decode_prefix_len: int, receiver: "PrfaasKVReceiver") -> None:
        """Reserves room for what the prefill server will send, and tells it where."""

        def offer(ticket: TicketInfo | None) -> None:
            value = Offer(
                room=room,
                endpoint=self.local_ip,
                dst_port=self.rank_port,
                num_pages=len(pages),
                decode_prefix_len=decode_prefix_len,
                ticket=ticket,
            )
            receiver.offer(offer_frames(value))

        with self._rooms:
            self._aux_index[room] = aux_index
            self._parts[room] = set() if len(pages) else {"pages"}
            if len(pages):
                self._handoffs[room] = ReceivingHandoff(
                    self.agent,
                    self._pages,
                    self._reservations,
                    f"room-{room}",
                    np.array(pages, dtype=np.int32),
                    timeout_s=self.waiting_timeout,
                    on_ticket=offer,
                    on_end=lambda reason: self.fail(room, reason) if reason else self._there(room, "pages"),
                )
        if not len(pages):
            offer(None)

    def _there(self, room: int, part: str) -> None:
        """A part of what a room waits for has come; with pages and the prefill's word it is complete."""
        with self._rooms:
            parts = self._parts.get(room)
            if parts is None:
                return
            parts.add(part)
            if parts != {"pages", "auxiliary", "word"}:
                return
            del self._parts[room]
            self._aux_index.pop(room, None)
            self._handoffs.pop(room, None)
        self.update_status(room, KVPoll.Success)

    def _hear_prefill(self) -> None:
        while True:
            frames = self.server_socket.recv_multipart()
            try:
                self._hear_from_prefill(frames)
            except Exception:  # one broken message must not end all requests
                log.exception("a message of a prefill server")

    def _hear_from_prefill(self, frames: list[bytes]) -> None:
        if frames[0] == AUXILIARY:
            self._hear_auxiliary(read_auxiliary(frames))
        elif (said := self.parse_kv_status_message(frames)) is not None:
            room, status, _, reason = said
            if status == KVPoll.Success:
                self._there(room, "word")
            elif status == KVPoll.Failed:
                self.fail(room, reason or self.DEFAULT_PREFILL_FAILURE_REASON)

    def _hear_auxiliary(self, auxiliary: Auxiliary) -> None:
        with self._rooms:
            index = self._aux_index.get(auxiliary.room)
            if index is None:
                return
            try:
                if len(auxiliary.items) != len(self._aux):
                    raise PagesInvalid(f"{len(auxiliary.items)} metadata buffers, there are {len(self._aux)} here")
                for buffer, item in zip(self._aux, auxiliary.items, strict=True):
                    write_item(buffer, index, item)
            except PagesInvalid as exc:
                self.fail(auxiliary.room, f"auxiliary data: {exc}")
                return
        self._there(auxiliary.room, "auxiliary")


class PrfaasKVSender(CommonKVSender):  # type: ignore[misc]
    """One request of a prefill server."""

    def __init__(
        self, mgr: PrfaasKVManager, bootstrap_addr: str, bootstrap_room: int, *args: Any, **options: Any
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room, *args, **options)
        mgr.fail_if_aborted(bootstrap_room)

    def abort(self) -> None:
        super().abort()
        self.kv_mgr.conclude_failure(bootstrap_room=self.bootstrap_room, failure_reason="aborted by prefill")

    def clear(self) -> None:
        self.kv_mgr.forget(self.bootstrap_room)
        with self.kv_mgr._rooms:  # else an offer that is being heard makes the room anew, for ever
            super().clear()


class PrfaasKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    """One request of a decode server."""

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        """Pages and an item of auxiliary data are there to be filled."""
        if self.bootstrap_infos is None or aux_index is None:
            self.kv_mgr.fail(self.bootstrap_room, f"nothing is known of the prefill server {self.bootstrap_addr}")
            return
        self.init_time = time.time()  # noqa: TID251 — SGLang counts its timeout from here, by this clock
        self.kv_mgr.land(self.bootstrap_room, kv_indices, aux_index, decode_prefix_len or 0, self)

    def offer(self, frames: list[bytes]) -> None:
        """Tells the prefill server; from the agent's thread."""
        for info in self.bootstrap_infos or ():
            if not self._send_bootstrap_message(bootstrap_info=info, message=frames, operation="send_metadata"):
                self.invalidate_cached_bootstrap_infos()

    def poll(self) -> int:
        """As SGLang's. The prefill server hears of a request that has failed here."""
        status: int = super().poll()
        if status == KVPoll.Failed:
            self.ensure_abort_notified()
        return status

    def clear(self) -> None:
        self.kv_mgr.forget(self.bootstrap_room)
        super().clear()

    def _register_kv_args(self) -> bool:
        """Nothing to say before there is a request: its ticket says which layout its pages have."""
        return self.bootstrap_infos is not None


CLASSES: Final[dict[str, type]] = {
    "kvargs": KVArgs,
    "manager": PrfaasKVManager,
    "sender": PrfaasKVSender,
    "receiver": PrfaasKVReceiver,
    "bootstrap_server": CommonKVBootstrapServer,
}


def pools_of(args: KVArgs, server_args: Any) -> Pools:
    """SGLang's description of a server's memory."""
    parallel = get_parallel()
    return Pools(
        buffers=tuple(
            Buffer(pointer=pointer, num_bytes=length, item_bytes=item)
            for pointer, length, item in zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True)
        ),
        page_tokens=args.page_size,
        dtype=args.kv_cache_dtype_str,
        device=get_device().device,
        states=tuple(kind.value for kind in args.state_types),
        ranks=(
            ("tensor parallel", parallel.attn_tp_size),
            ("context parallel", max(parallel.attn_cp_size, parallel.attn_dcp_size)),
            ("data parallel", max(parallel.attn_dp_size, parallel.dp_size)),
            ("pipeline parallel", parallel.pp_size),
        ),
        features=tuple(name for name in UNSUPPORTED if getattr(server_args, name, False)),
    )


def _setting(name: str) -> str:
    if not (value := os.environ.get(name, "")):
        raise ValueError(f"{name} is not set: where the agent of this server's node is reached")
    return value
