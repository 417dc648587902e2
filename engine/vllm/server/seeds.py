"""Seeds of requests, left alone by samples that are not used: those at the end of a prompt's chunk that is not the last.

A GPU's generator is taken back after such a sample; a CPU's cannot be (`cpu_build.mend_seeded_chunks`).
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def without_unread_seeds(sample: Callable[..., T]) -> Callable[..., T]:
    """`sample` of a model runner, without the generators of requests whose token will not be used. They are set aside."""

    @functools.wraps(sample)
    def sampling(runner: Any, *args: Any, **kwargs: Any) -> T:
        generators, unread = runner.input_batch.generators, runner.discard_request_mask.np
        aside = {index: generators.pop(index) for index in tuple(generators) if unread[index]}
        runner.seeds_set_aside = aside
        return sample(runner, *args, **kwargs)

    return sampling


def with_seeds_back(keep_books: Callable[..., T]) -> Callable[..., T]:
    """What a model runner does after sampling; then the generators that were set aside are back."""

    @functools.wraps(keep_books)
    def keeping(runner: Any, *args: Any, **kwargs: Any) -> T:
        try:
            return keep_books(runner, *args, **kwargs)
        finally:
            runner.input_batch.generators.update(runner.seeds_set_aside)

    return keeping
