"""/v1/models, /health, /version, /metrics: the server about itself."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from starlette.responses import Response

from obole import __version__
from obole.server.endpoint import Call, Endpoint, json_response
from obole.server.metrics import CONTENT_TYPE


class Model(Struct, kw_only=True):
    """`max_model_len`: tokens of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "obole"
    max_model_len: int


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Health(Struct, kw_only=True):
    """`status`: "ok", or why requests are refused."""

    status: Literal["ok", "draining", "failed"]
    reason: str | None = None


class Version(Struct, kw_only=True):
    version: str


def _model(call: Call, name: str) -> Model:
    server = call.server
    return Model(id=name, created=server.created, max_model_len=server.engine.engine.max_context)


async def list_models(call: Call) -> Response:
    return json_response(ModelList(data=[_model(call, name) for name in call.server.model_names]))


async def one_model(call: Call) -> Response:
    name = call.scope["path_params"]["name"]
    call.server.check_model(name)
    return json_response(_model(call, name))


async def health(call: Call) -> Response:
    """200 while requests are taken, else 503: for load balancers and probes."""
    server = call.server
    if not server.engine.healthy:
        return json_response(Health(status="failed", reason=repr(server.engine.failure)), 503)
    if server.draining:
        return json_response(Health(status="draining"), 503)
    return json_response(Health(status="ok"))


async def version(_call: Call) -> Response:
    return json_response(Version(version=__version__))


async def metrics(call: Call) -> Response:
    return Response(call.server.metrics.page(), media_type=CONTENT_TYPE)


ENDPOINTS = (
    Endpoint(method="GET", path="/v1/models", handle=list_models, about="The models that are served.", answer=ModelList),
    Endpoint(method="GET", path="/v1/models/{name:path}", handle=one_model, about="One of them.", answer=Model),
    Endpoint(
        method="GET",
        path="/health",
        handle=health,
        about="Whether requests are taken.",
        answer=Health,
        public=True,
        quiet=True,
        more_statuses={503: "The server shuts down, or its engine has failed."},
    ),
    Endpoint(method="GET", path="/version", handle=version, about="The version of obole.", answer=Version),
    Endpoint(
        method="GET", path="/metrics", handle=metrics, about="Counters for Prometheus.", answer_type="text/plain", quiet=True
    ),
)
