"""Scripted nodes that are paired by rooms, as SGLang's servers are: a decode node waits for the prefill of its room."""

from typing import Any

from aiohttp import web

from tests.gateway.scripted import ScriptedNode, next_of
from transport.control.proto import node_pb2 as pb

BOOTSTRAP_PORT = 8998


class PairedNode(ScriptedNode):
    """One node. Faults are those of `ScriptedNode`; errors have SGLang's shape, and are told to the other server of the room."""

    def description(self) -> pb.NodeDescription:
        description = super().description()
        port = BOOTSTRAP_PORT if self.role == "prefill" else 0
        description.rooms.CopyFrom(pb.Rooms(host=self.node_id, port=port))
        return description

    async def reserve(self, request: pb.ReserveRequest) -> pb.Ticket:
        raise AssertionError("a paired node reserves by itself")

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.bodies.append(body)
        room = str(body["bootstrap_room"])
        self.fabric.open_once(room)
        self.running += 1
        try:
            if self.role == "prefill":
                return await self._prefill_in(http, room)
            return await self._decode(
                http, body | {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": room}}
            )
        finally:
            self.running -= 1

    async def _prefill_in(self, http: web.Request, room: str) -> web.StreamResponse:
        if self.script.prefill_gate is not None:
            await self.script.prefill_gate.wait()
        fault = next_of(self.script.prefill)
        if fault and fault.split()[0].isdigit():
            self.fabric.end(room, fault.partition(" ")[2] or "scripted")
        if refusal := await self._fault(http, fault):
            return refusal
        self.fabric.end(room)
        usage = {"prompt_tokens": 200, "completion_tokens": 1}
        usage |= (
            {"prompt_tokens_details": {"cached_tokens": self.script.cached_tokens}} if self.script.cached_tokens else {}
        )
        return web.json_response({"choices": [{"index": 0, "text": "one", "finish_reason": "length"}], "usage": usage})

    async def _load(self, params: dict[str, Any]) -> str:
        if why := await self.fabric.landed(params["transfer_id"]):
            raise web.HTTPInternalServerError(text=_told(why, 500), content_type="application/json")
        return ""

    async def _fault(self, http: web.Request, fault: str) -> web.Response | None:
        status, _, message = fault.partition(" ")
        if not status.isdigit():
            return await super()._fault(http, fault)
        told = _told(message or "scripted", int(status))
        if (await http.json()).get("stream"):  # what goes wrong later than checks of the request
            return web.Response(text=f'data: {{"error": {told}}}\n\ndata: [DONE]\n\n', content_type="text/event-stream")
        return web.json_response(text=told, status=int(status))


def _told(message: str, status: int) -> str:
    return f'{{"object": "error", "message": "{message}", "type": "{status}", "param": null, "code": {status}}}'
