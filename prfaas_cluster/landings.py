"""A PrfaaS node's engine prefills; what lands here are prefixes for its cache, which no engine claims."""

from collections import Counter

from node.transfer.incoming import Consumer
from node.transfer.job_replies import Reply
from transport.control import messages as m


class NoLandings:
    """Refuses every claim: an engine that asks for one was told to decode."""

    def __init__(self, consumer: Consumer) -> None:
        self.refused: Counter[str] = Counter()
        self.jobs: Counter[tuple[str, str]] = Counter()
        self.loaded_tokens = 0

    def claim(self, message: m.ClaimLanding, owner: object, reply: Reply) -> None:
        """Answers with Refused."""
        self.refused["wrong_role"] += 1
        reply(m.Refused(job=message.job, reason="wrong_role", detail="a PrfaaS cluster prefills, it does not decode"))

    def end(self, message: m.EndJob, owner: object) -> None:
        """Nothing was lent."""

    def engine_gone(self, owner: object) -> None:
        """Nothing was lent."""
