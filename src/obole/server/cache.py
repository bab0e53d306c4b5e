"""/v1/cache: what is kept of a tenant's requests, and how to be rid of it."""

from __future__ import annotations

from msgspec import Struct
from starlette.responses import Response

from obole.server.endpoint import Call, Endpoint, json_response


class Deleted(Struct, kw_only=True):
    """`device_blocks`: deleted in the KV pool; `tier_blocks`: in RAM and on SSD. A block may have been in both."""

    object: str = "cache.deleted"
    device_blocks: int
    tier_blocks: int


async def delete(call: Call) -> Response:
    """Delete what is cached of the caller's own requests, in every tier, and the texts kept to draft from.

    Requests under way go on, and leave nothing behind. Files have been overwritten when this answers, unless the disk does
    not answer for a minute. Stored responses have an endpoint of their own.
    """
    gone = await call.server.engine.forget(call.tenant.salt)
    return json_response(Deleted(device_blocks=gone.device_blocks, tier_blocks=gone.tier_blocks))


ENDPOINTS = (
    Endpoint(method="DELETE", path="/v1/cache", handle=delete, about="Delete what is cached of your requests.", answer=Deleted),
)
