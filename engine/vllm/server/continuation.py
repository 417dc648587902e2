"""Continues another server's answer as if vLLM's front end had produced all of it."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from copy import copy
from typing import Any


async def going_on(
    rest: AsyncGenerator[Any, None], asked: list[int], answered: Sequence[int], spelling: Any
) -> AsyncIterator[Any]:
    """What vLLM says of a whole answer to the prompt `asked`: `answered` one by one, as it was said, then the `rest` of it.

    `rest` has no text, and ends by no stop string: that takes what `spelling`, vLLM's detokenizer, knows of the answer.
    """
    is_first = True
    async with aclosing(rest):
        async for told in rest:
            if told.prompt_token_ids is not None:
                told.prompt_token_ids = asked
            if told.num_cached_tokens is not None:
                told.num_cached_tokens = min(told.num_cached_tokens, len(asked))
            if is_first:
                is_first = False
                for token in answered:
                    spelling.update([token], False)
                    yield _told_before(told, token, spelling.get_next_output_text(False, True))
            (output,) = told.outputs
            known = spelling.num_output_tokens()
            stop = spelling.update(list(output.token_ids), output.finish_reason == "stop")
            if stop is not None:
                output.finish_reason, output.stop_reason = "stop", stop
                output.token_ids = spelling.output_token_ids[known:]
                told.finished = True
            output.text = spelling.get_next_output_text(told.finished, True)
            yield told
            if told.finished:
                return


def _told_before(told: Any, token: int, text: str) -> Any:
    output = copy(told.outputs[0])
    output.token_ids, output.text, output.finish_reason, output.stop_reason = [token], text, None, None
    before = copy(told)
    before.outputs, before.finished = [output], False
    return before
