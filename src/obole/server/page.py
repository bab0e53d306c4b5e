"""The page at /: a chat with receipts and live figures. Plain files, which browsers take as they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from starlette.responses import Response

from obole.server.endpoint import Call, Endpoint
from obole.server.errors import ApiError

# Everything comes from here, nothing is written into the markup, and text can only become text (trusted types): what a model
# says cannot do anything on the page.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page. `tag`: its ETag."""

    content: bytes
    type: str
    tag: str


def _assets() -> dict[str, Asset]:
    found = {}
    for file in (resources.files("obole.server") / "page").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


ASSETS = _assets()


def _response(call: Call, asset: Asset) -> Response:
    """The file, or 304 where the browser has it. It asks each time, so that a new version is never mixed with an old one."""
    headers = {
        "cache-control": "no-cache",
        "etag": asset.tag,
        "content-security-policy": POLICY,
        "cross-origin-opener-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    known = call.headers.get(b"if-none-match", b"").decode("latin-1").split(",")
    if asset.tag in (tag.strip().removeprefix("W/") for tag in known):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.type)


async def index(call: Call) -> Response:
    return _response(call, ASSETS["index.html"])


async def asset(call: Call) -> Response:
    name = call.scope["path_params"]["name"]
    found = ASSETS.get(name)
    if found is None:
        raise ApiError(404, f"There is nothing at /page/{name}.", code="not_found")
    return _response(call, found)


ENDPOINTS = (
    Endpoint(
        method="GET",
        path="/",
        handle=index,
        about="A page to chat on.",
        answer_type="text/html",
        public=True,
        more_statuses={304: "It is as the browser has it."},
    ),
    Endpoint(
        method="GET",
        path="/page/{name}",
        handle=asset,
        about="A file of that page.",
        answer_type="*/*",
        public=True,
        quiet=True,
        more_statuses={304: "It is as the browser has it.", 404: "The page has no such file."},
    ),
)
