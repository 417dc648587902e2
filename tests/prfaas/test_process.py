"""A child process of the command line."""

import asyncio
from pathlib import Path

import pytest

from node.start_log import earlier
from prfaas.errors import StartError
from prfaas.process import Process

SAYS = "import sys; sys.exit({!r})"  # on standard error, with status 1
START_S = 60.0


def test_a_start_that_fails_is_told_with_its_own_last_words_only(tmp_path: Path) -> None:
    log = tmp_path / "far.log"

    async def scenario() -> None:
        for words in ("no such model", "address in use"):
            process = Process("far", ["-c", SAYS.format(words)], log)
            await process.start()
            with pytest.raises(StartError) as failure:
                await process.line("READY", START_S)
            assert str(failure.value).endswith(f"end of {log}:\n{words}\n")

    asyncio.run(scenario())
    assert (log.read_text(), earlier(log, 1).read_text()) == ("address in use\n", "no such model\n")
