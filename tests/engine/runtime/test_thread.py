"""The thread of a model: what comes in is answered, however it ends."""

import queue

from engine.byte_tokenizer import byte_text
from engine.emulated.emulated import EmulatedEngine, emulated_layout
from engine.errors import EngineError
from engine.runtime.scheduler import ModelWork, Prefilled, Scheduler, WorkFailed
from engine.runtime.thread import ModelThread
from tests.engine.builders import random_tokens

PATIENCE_S = 60.0


class Dying(EmulatedEngine):
    """Can compute nothing, and finds it out at its first prompt."""

    @property
    def takes_more(self):
        raise EngineError("a stage has died")


def thread_of(engine_class, on_death=lambda: None):
    engine = engine_class(emulated_layout("llama", 64), lambda seconds: None)
    return ModelThread(Scheduler(engine, byte_text(), lambda: 0.0, chunk_tokens=64), on_death=on_death)


def submit(thread, events):
    thread.submit(ModelWork(id="a", prompt=random_tokens(100), params=None, emit=events.put))


def test_work_that_comes_to_a_dead_model_fails_at_once():
    died = queue.SimpleQueue()
    thread, events = thread_of(Dying, on_death=lambda: died.put(True)), queue.SimpleQueue()
    thread.start()
    submit(thread, events)
    assert isinstance(events.get(timeout=PATIENCE_S), WorkFailed)
    assert died.get(timeout=PATIENCE_S)
    submit(thread, events)
    assert isinstance(events.get(timeout=PATIENCE_S), WorkFailed)
    thread.stop(PATIENCE_S)


def test_being_woken_with_nothing_to_do_is_harmless():
    thread, events = thread_of(EmulatedEngine), queue.SimpleQueue()
    thread.start()
    thread.wake()
    submit(thread, events)
    assert isinstance(events.get(timeout=PATIENCE_S), Prefilled)
    thread.stop(PATIENCE_S)
    assert not thread.alive
