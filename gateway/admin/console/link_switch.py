"""The switch for maintenance: `POST /prfaas/links {"source": "east", "destination": "west", "drained": true}`.

Nothing new goes over a drained link: requests, moves either way, copies. What is under way goes on. All workers know within a
beat of each. The switch is forgotten when the gateway is started anew, but with
`drained_dir`.
"""

import logging

import msgspec

from gateway.api.openai import NOT_JSON
from gateway.cluster.drained_links import DrainedLinks
from gateway.cluster.links import ClusterLinks, LinkStatus
from gateway.errors import ApiError, BadRequest, Unavailable

log = logging.getLogger("prfaas.gateway.links")


class LinkSwitchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator wants of a link."""

    source: str
    destination: str
    drained: bool


class LinkSwitch:
    """Drains links, and has them used again."""

    def __init__(self, links: ClusterLinks, drained: DrainedLinks) -> None:
        self._links = links
        self._drained = drained

    def wanted(self, body: bytes) -> LinkSwitchRequest:
        """What `body` asks for. Raises BadRequest."""
        try:
            return msgspec.json.decode(body, type=LinkSwitchRequest)
        except NOT_JSON as error:
            raise BadRequest(f"The body does not switch a link: {error}", code="invalid_value") from error

    def set(self, wanted: LinkSwitchRequest) -> list[LinkStatus]:
        """All links after the change. Raises ApiError."""
        link = (wanted.source, wanted.destination)
        known = {(status.source, status.destination) for status in self._links.status()} | self._drained.links()
        if link not in known:
            message = f"There is no link from '{wanted.source}' to '{wanted.destination}'."
            raise ApiError(404, message, code="link_not_found")
        try:
            self._drained.set(link, wanted.drained)
        except OSError as error:
            log.error("a link cannot be drained: %s", error)
            raise Unavailable("The other workers cannot be told.", "not_shared") from error
        self._links.drain(self._drained.links())
        return self._links.status()
