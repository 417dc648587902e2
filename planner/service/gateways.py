"""Asks gateways what they were asked for and what they see."""

import asyncio
from collections import Counter
from typing import Final

import aiohttp
import msgspec

from planner.decisions.plans.offered import GatewayLoad
from planner.solve.control.readings import Readings
from transport.control.bounded import BodyTooLong, read_bounded
from transport.wire.asked_servers import AskedServers, trust_of

MAX_LOAD_BYTES: Final = 4 << 20
_DECODER: Final = msgspec.json.Decoder(GatewayLoad)


class Gateways:
    """All of them; `urls` may change while it runs. `answers` says what each came to at the last poll.

    `asked` knows which certificates they may have that speak HTTPS; None: those that this host trusts.
    """

    def __init__(
        self,
        urls: tuple[str, ...],
        timeout_s: float,
        operator_key: str = "",
        asked: AskedServers | None = None,
        model: str = "",
    ) -> None:
        """`model` is the one whose load is asked for; "": the default one of each gateway."""
        self._model = {"model": model} if model else {}
        self.urls = urls
        self.answers: dict[str, str] = {}
        self.failed: Counter[str] = Counter()
        self._timeout_s = timeout_s
        self._asked = asked
        self._headers = {"Authorization": f"Bearer {operator_key}"} if operator_key else {}

    async def poll(self, http: aiohttp.ClientSession, readings: Readings) -> list[GatewayLoad]:
        """Asks all of them at once and tells `readings`; who does not answer in time is left out, and counted."""
        urls = self.urls
        readings.keep(urls)
        loads = await asyncio.gather(*(self._ask(http, url, readings.query(url) | self._model) for url in urls))
        self.answers = {url: self.answers[url] for url in urls}
        for url, load in zip(urls, loads, strict=True):
            if load is not None:
                readings.heard(url, load)
        return [load for load in loads if load is not None]

    async def _ask(self, http: aiohttp.ClientSession, url: str, query: dict[str, str]) -> GatewayLoad | None:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                http.get(
                    f"{url.rstrip('/')}/prfaas/load",
                    params=query,
                    headers=self._headers,
                    allow_redirects=False,
                    ssl=trust_of(self._asked, url),
                ) as answer,
            ):
                answer.raise_for_status()
                load = _DECODER.decode(await read_bounded(answer.content.iter_any(), MAX_LOAD_BYTES))
                self.answers[url] = f"follows version {load.follows.version}" if load.follows else "follows no plan"
                return load
        except TimeoutError:
            self._failed(url, "timeout", "no answer in time")
        except aiohttp.ClientResponseError as error:
            self._failed(url, f"status_{error.status}", f"status {error.status}")
        except (aiohttp.ClientError, OSError) as error:  # OSError: files of our own
            self._failed(url, "unreachable", str(error) or type(error).__name__)
        except (BodyTooLong, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._failed(url, "bad_answer", f"no load: {error}")
        return None

    def _failed(self, url: str, reason: str, text: str) -> None:
        self.failed[reason] += 1
        self.answers[url] = text
