"""A worker's side of the connector: one rank's part of each slab, between vLLM's KV tensors and the page arena.

Layers are copied on a thread of their own as soon as the operator that fills them returns, while the next layer
computes. A step waits for its last copies before it ends, so no block that it has freed is ever read; a save that takes
too long is given up. On an accelerator it waits until they are submitted, and its device waits for the copies before it
goes on. Loads fill blocks that nothing else may touch, after whatever the model has launched before, and take as many steps
as they need; a step with nothing to compute waits a little for one to end. An error here costs a save or a load, never the
model's step.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from engine.agent.block_copies import BlockCopies
from engine.agent.job_pages import MappedArena
from engine.errors import PagesInvalid
from engine.vllm.copy_plan import CopyPlan, PagesIndex
from engine.vllm.layout import LayerKind, LayerPlace, VllmLayout, unloadable
from engine.vllm.scheduler_side.steps import (
    ArenaRef,
    ForwardStep,
    LayerWritten,
    LoadBlocks,
    SaveBlocks,
    SaveFailed,
    StateWritten,
    StepWritten,
)
from engine.vllm.worker_side.accelerator import device_of
from engine.vllm.worker_side.blocks import Blocks, blocks_of
from engine.vllm.worker_side.device import OVER, ArenaMemory, CopyDevice, HostDevice, Mark
from engine.vllm.worker_side.gaps import blocks_around
from engine.vllm.worker_side.ranks import RankLink
from engine.vllm.worker_side.saver import SAVE_TIMEOUT_S, Saver
from transport.control.messages import ControlMessage

log = logging.getLogger(__name__)

LOAD_WAIT_S: Final = 0.01  # of a step with nothing to compute; a request that has just come waits for its end
MAX_NAMED: Final = 3  # layers in a reason
MAX_RELEASED: Final = 4096  # a step with a released job was built before the release: a handful at most


class PageGrant:
    """Pages of a job in this worker's hands."""

    def __init__(self, index: PagesIndex, arena: ArenaMemory) -> None:
        self.index: Final = index
        self.arena: Final = arena
        self._using = threading.Lock()
        self._marks: list[Mark] = []  # of copies that may be under way
        self._released = False

    def use(self, copy: Callable[[], Mark]) -> Mark:
        """Runs a copy that touches the pages, or submits it; returns when it is over. Raises PagesInvalid once they are
        released."""
        with self._using:
            if self._released:
                raise PagesInvalid("the pages are no longer ours")
            mark = copy()
            self._marks = [each for each in (*self._marks, mark) if not each.is_over()]
            return mark

    def release(self) -> None:
        """When this returns no copy is under way, and none will be."""
        with self._using:
            self._released = True
        for mark in self._marks:
            mark.wait()


@dataclass(slots=True)
class StepSave:
    """A save of one step. The saver's thread plans its copies at the first layer, for all of them.

    `written`: layers that are in the pages, each with the length up to which it is, or after which its state is.
    """

    save: SaveBlocks
    grant: PageGrant | None = None
    plan: CopyPlan | None = None
    written: set[tuple[str, int]] = field(default_factory=set)
    has_states: bool = False  # they have been submitted


@dataclass(slots=True)
class CopyCounts:
    """What was copied since the last look. Seconds are those of the copying threads, which only submit saves to a device."""

    bytes_saved: int = 0
    save_s: float = 0.0
    bytes_loaded: int = 0
    load_s: float = 0.0
    waited_s: float = 0.0  # of the model for the copies of its step
    saves_given_up: int = 0  # jobs whose copies took too long
    bytes_buffered: Counter[str] = field(default_factory=Counter)  # of those above, by why they took the longer way


@dataclass(slots=True)
class LoadResults:
    """Requests whose load ended; `failed` ones are among `done` as well."""

    done: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerSide:
    """One rank. Methods belong to the model's thread."""

    def __init__(
        self,
        layout: VllmLayout,
        rank: int,
        *,
        own: Collection[str] | None = None,
        drafts: Collection[str] = (),
        in_microbatches: bool = False,
        load_wait_s: float = LOAD_WAIT_S,
        save_timeout_s: float = SAVE_TIMEOUT_S,
        devices: Callable[[torch.device], CopyDevice] = device_of,
    ) -> None:
        """`own`: names of the layers that this rank's pipeline stage has, None for all. `drafts`: those that a step
        computes several times. `in_microbatches`: a layer says that
        it is final once for each part of a step's requests, so it is not until the step ends."""
        self._layout = layout
        self._rank = rank
        self._load_wait_s = load_wait_s
        self._in_microbatches = in_microbatches
        self._drafts = frozenset(drafts)
        self._places = {place.layer.name: place for place in layout.places if own is None or place.layer.name in own}
        self._devices = devices
        self._device: CopyDevice = HostDevice()
        self._save_stream, self._load_stream = self._device.stream(), self._device.stream()
        self._blocks: dict[str, Blocks] = {}
        self._step = ForwardStep()
        self._saves: tuple[StepSave, ...] = ()
        self._seen: set[str] = set()  # layers whose KV of this step is final, by their own word
        self._arena: tuple[ArenaRef, ArenaMemory] | None = None
        self._link: RankLink | None = None
        self._unsaid: list[SaveFailed] = []  # until there is a link
        self._grants: dict[str, PageGrant] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()  # _grants, _released, _results, _counts, _unsaid, _link
        self._results = LoadResults()
        self._counts = CopyCounts()
        self._saver = Saver(self._send, save_timeout_s)
        self._loader = ThreadPoolExecutor(1, "prfaas-load")
        self._loading: set[Future[None]] = set()

    def register(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The KV tensors by layer name. Raises PagesInvalid when they are not what the layout says."""
        if lacking := self._places.keys() - tensors.keys():
            raise PagesInvalid(f"{min(lacking)}: no such KV tensor")
        if self._places:
            self._device = self._devices(tensors[next(iter(self._places))].device)
            self._save_stream, self._load_stream = self._device.stream(), self._device.stream()
        for name, place in self._places.items():
            layer, tensor = place.layer, tensors[name]
            if layer.gap_bytes:
                self._blocks[name] = blocks_around(layer, tensor, self._device, self._note_buffered)
            else:
                self._blocks[name] = blocks_of(name, tensor, layer.part_bytes, self._device, self._note_buffered)

    def begin_step(self, step: ForwardStep) -> None:
        """Takes over what a step brings. Pages that cannot be reached, or given back, are not taken."""
        self._step = step
        self._saves = tuple(map(StepSave, step.saves))
        self._seen.clear()
        try:
            self._join(step)
            arena = self._mapped(step)
        except (OSError, PagesInvalid) as exc:
            for pages in step.grants:
                self._saver.give_up(pages.job, f"no access to its pages: {exc}")
            return
        with self._lock:
            for pages in step.grants:
                if pages.job not in self._released and arena is not None:
                    self._grants[pages.job] = PageGrant(PagesIndex(self._layout.model, pages), arena)

    def _join(self, step: ForwardStep) -> None:
        """Without a link pages could not be asked back. Raises OSError."""
        if not step.socket or self._link is not None:
            return
        link = RankLink(step.socket, self._rank, self.release, self._lost)
        with self._lock:
            self._link, unsaid, self._unsaid = link, self._unsaid, []
        for message in unsaid:
            link.send(message)

    def _mapped(self, step: ForwardStep) -> ArenaMemory | None:
        """The page arena, mapped anew for every agent. Raises OSError and PagesInvalid."""
        if step.arena is not None and (self._arena is None or self._arena[0] != step.arena):
            self._arena = None
            opened = MappedArena.open(Path(step.arena.path), step.arena.page_bytes, step.arena.num_pages)
            self._arena = (step.arena, ArenaMemory(opened.data))
            self._device.adopt(self._arena[1])
        return self._arena[1] if self._arena is not None else None

    def save_layer(self, name: str) -> None:
        """The layer's KV of this step is final."""
        place = self._places.get(name)
        if not self._saves or place is None or place.layer.kind is LayerKind.STATE:
            return
        if name not in self._seen and name not in self._drafts and not self._in_microbatches:
            self._submit_attention(place)

    def _submit_attention(self, place: LayerPlace) -> None:
        self._seen.add(place.layer.name)
        mark = self._device.mark()
        for saving in self._saves:
            self._submit(saving.save, self._save_attention, place, saving, mark)

    def start_loads(self) -> None:
        """Starts the loads of this step. What has been launched so far may still zero the blocks that they fill."""
        if not self._step.loads and not self._loading:
            return
        mark = self._device.mark()
        self._loading = {load for load in self._loading if not load.done()}
        self._loading |= {self._loader.submit(self._load, load, mark) for load in self._step.loads}

    def finish_forward(self) -> None:
        """The model has computed, and samples next. Where that accepts the drafts of a step it may move the state before them, so
        that one is saved now. A runner that does not call this accepts no draft in such a step."""
        if drafted := [saving for saving in self._saves if saving.save.is_drafted]:
            self._submit_states(drafted)
            self._wait_for_copies()

    def finish_step(self) -> None:
        """Saves the states at the end of this step, and layers that have not said that they are final. Waits until all of it
        is in pages, or submitted to a device. With nothing to save it waits for a load."""
        if self._saves:
            for place in self._places.values():
                if place.layer.kind is not LayerKind.STATE and place.layer.name not in self._seen:
                    self._submit_attention(place)
            self._submit_states([saving for saving in self._saves if not saving.has_states])
            for saving in self._saves:
                self._submit(saving.save, self._note_step, saving)
            self._wait_for_copies()
        if self._step.is_idle:
            self._loading = wait(self._loading, self._load_wait_s, FIRST_COMPLETED).not_done
        self._step, self._saves = ForwardStep(), ()

    def _submit_states(self, savings: Iterable[StepSave]) -> None:
        mark = self._device.mark()
        for saving in savings:
            saving.has_states = True
            for place in self._places.values() if saving.save.states else ():
                if place.layer.kind is LayerKind.STATE:
                    self._submit(saving.save, self._save_state, place, saving, mark)

    def _wait_for_copies(self) -> None:
        started_s = time.perf_counter()
        given_up = self._saver.wait()
        self._device.hold_model(
            self._save_stream.mark()
        )  # it may write these blocks again, or be given them for others
        with self._lock:
            self._counts.waited_s += time.perf_counter() - started_s
            self._counts.saves_given_up += given_up

    def take_results(self) -> LoadResults:
        """Loads that ended since the last call."""
        with self._lock:
            results, self._results = self._results, LoadResults()
        return results

    def take_counts(self) -> CopyCounts:
        """What was copied since the last call."""
        with self._lock:
            counts, self._counts = self._counts, CopyCounts()
        return counts

    def close(self) -> None:
        self._saver.close()
        self._loader.shutdown(cancel_futures=True)
        self._device.close()
        if self._link is not None:
            self._link.close()

    # Saving, on the saver's thread

    def _submit(self, save: SaveBlocks, copy: Callable[..., None], *arguments: Any) -> None:
        self._saver.submit(save.job, lambda: copy(*arguments))

    def _save_attention(self, place: LayerPlace, saving: StepSave, mark: Any) -> None:
        if not self._layout.part(place, self._rank).writes:
            return
        save, (grant, plan) = saving.save, self._planned(saving)
        copied = self._save_copies(place, grant, plan.attention(place), mark)
        saving.written.add((place.layer.name, save.stop))
        message = LayerWritten(job=save.job, group=place.group, layer=place.number, num_tokens=save.stop)
        self._saver.announce(save.job, message, copied)

    def _save_state(self, place: LayerPlace, saving: StepSave, mark: Any) -> None:
        if not self._layout.part(place, self._rank).writes:
            return
        save, (grant, plan) = saving.save, self._planned(saving)
        for length in save.states:
            if not (copies := plan.state(place, length)):
                continue
            copied = self._save_copies(place, grant, copies, mark)
            saving.written.add((place.layer.name, length))
            message = StateWritten(job=save.job, group=place.group, layer=place.number, num_tokens=length)
            self._saver.announce(save.job, message, copied)

    def _planned(self, saving: StepSave) -> tuple[PageGrant, CopyPlan]:
        """Raises PagesInvalid once the pages are released."""
        grant = self._grant(saving.save.job)
        if saving.plan is None or saving.grant is not grant:
            saving.grant, saving.plan = grant, self._plan(grant, saving.save)
        return grant, saving.plan

    def _note_step(self, saving: StepSave) -> None:
        """The step is written once every layer is: one that is left out would be used with whatever its pages held."""
        save, grant = saving.save, self._grant(saving.save.job)
        missing = [name for name, length in self._due(save, grant) if (name, length) not in saving.written]
        if missing:
            some = ", ".join(missing[:MAX_NAMED])
            self._saver.give_up(save.job, f"{len(missing)} layers were not copied up to {save.stop} tokens: {some}")
        else:
            message = StepWritten(job=save.job, num_tokens=save.stop)
            self._saver.announce(save.job, message, self._save_stream.mark())

    def _due(self, save: SaveBlocks, grant: PageGrant) -> Iterator[tuple[str, int]]:
        """What this rank has to write of a step: layers, each up to which length."""
        for place in self._places.values():
            if not self._layout.part(place, self._rank).writes:
                continue
            if place.layer.kind is not LayerKind.STATE:
                yield place.layer.name, save.stop
                continue
            kept = grant.index.pages.states[place.group]
            yield from ((place.layer.name, length) for length in save.states if kept.get(length))

    def _save_copies(self, place: LayerPlace, grant: PageGrant, copies: Sequence[BlockCopies], after: Mark) -> Mark:
        started_s, blocks = time.perf_counter(), self._blocks[place.layer.name]

        def copy() -> Mark:
            self._save_stream.wait_for(after)
            return blocks.read(copies, grant.arena, self._save_stream)

        copied = grant.use(copy)
        with self._lock:
            self._counts.bytes_saved += sum(each.num_bytes for each in copies)
            self._counts.save_s += time.perf_counter() - started_s
        return copied

    def _note_buffered(self, reason: str, num_bytes: int) -> None:
        with self._lock:
            self._counts.bytes_buffered[reason] += num_bytes

    # Loading, on the loader's thread

    def _load(self, load: LoadBlocks, after: Mark) -> None:
        failed = True
        try:
            self._load_parts(load, after)
            failed = False
        except PagesInvalid as exc:
            log.warning("load failed id=%s: %s", load.request_id, exc)
        except Exception:
            log.exception("load failed id=%s", load.request_id)
        finally:
            with self._lock:
                self._results.done.add(load.request_id)
                if failed:
                    self._results.failed.add(load.request_id)

    def _load_parts(self, load: LoadBlocks, after: Mark) -> None:
        grant, started_s, size = self._grant(load.job), time.perf_counter(), 0
        if why := unloadable(self._layout, grant.index.pages, load.tables, load.start, load.stop):
            raise PagesInvalid(why)
        plan, loaded = self._plan(grant, load), after
        self._load_stream.wait_for(after)
        for place in self._places.values():
            blocks, copies = self._blocks[place.layer.name], plan.of(place)
            loaded = grant.use(partial(blocks.write, copies, grant.arena, self._load_stream))
            size += sum(each.num_bytes for each in copies)
        loaded.wait()
        grant.use(lambda: OVER)  # still ours, so what was read was ours
        with self._lock:
            self._counts.bytes_loaded += size
            self._counts.load_s += time.perf_counter() - started_s

    # Pages

    def _plan(self, grant: PageGrant, of: SaveBlocks | LoadBlocks) -> CopyPlan:
        offers = of.offers if isinstance(of, SaveBlocks) else ()
        blocks = {(offer.table, offer.length): offer.block for offer in offers}
        return CopyPlan(self._layout, self._rank, grant.index, of.tables, of.start, of.stop, offers=blocks)

    def _grant(self, job: str) -> PageGrant:
        with self._lock:
            grant = self._grants.get(job)
        if grant is None:
            raise PagesInvalid("the pages are no longer ours")
        return grant

    def release(self, job: str) -> None:
        """Lets go of a job's pages: when this returns nothing reads or writes them, and nothing will. Any thread."""
        with self._lock:
            grant = self._grants.pop(job, None)
            self._released[job] = None
            while len(self._released) > MAX_RELEASED:
                self._released.popitem(last=False)
        if grant is not None:
            grant.release()
        self._saver.forget(job)

    def _lost(self) -> None:
        """The scheduler's side counts this rank as gone."""
        with self._lock:
            self._link, jobs = None, tuple(self._grants)
        for job in jobs:
            self.release(job)

    def _send(self, message: ControlMessage) -> None:
        with self._lock:
            link = self._link
            if link is None and isinstance(message, SaveFailed):
                self._unsaid = [*self._unsaid[-MAX_RELEASED:], message]
        if link is not None:
            link.send(message)
