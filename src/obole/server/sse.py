"""Server-sent events: one write for each, comments against silence, an end to readers that take nothing.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from obole.server.endpoint import Call
from obole.server.pace import shaped

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class EventStream(Response):
    """A response made of events, each as bytes with its empty line. `events` is closed at the end, whatever happens.

    An exception of `events` becomes the last event, in the form of the endpoint. Writing waits for the reader, and while it
    does the engine's deltas are joined; a reader that takes nothing for `stall_seconds` is cut off.
    """

    media_type = "text/event-stream"

    def __init__(self, call: Call, events: AsyncGenerator[bytes, None]) -> None:
        # proxies must neither keep nor gather what belongs on the screen now
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._call = call
        self._events = shaped(events, call.pace) if call.pace else events
        self._writing = False
        self._since = 0.0  # when the last write began
        call.record.streamed = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        clock = asyncio.get_running_loop().time
        self._since = clock()
        pulse = asyncio.create_task(self._pulse(send))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async with aclosing(self._events) as events:
                    async for event in events:
                        self._since, self._writing = clock(), True
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                        self._writing = False
            except Exception as error:
                last = self._call.endpoint.errors.event(self._call.told(error))
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            pulse.cancel()
            await self._events.aclose()

    async def _pulse(self, send: Send) -> None:
        config = self._call.server.config
        clock = asyncio.get_running_loop().time
        with suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(min(config.ping_seconds, config.stall_seconds) / 4)
                silent = clock() - self._since
                if self._writing and silent > config.stall_seconds:
                    self._call.record.error = f"The reader took nothing for {config.stall_seconds:g} seconds."
                    self._call.abort()
                    return
                if not self._writing and silent >= config.ping_seconds:
                    self._since = clock()
                    await send({"type": "http.response.body", "body": PING, "more_body": True})
