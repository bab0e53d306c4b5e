"""Fields that several APIs share: how the next token is chosen, what the answer must look like, what is expected."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from obole.server.endpoint import Call
from obole.server.errors import refused
from obole.types import MAX_CHOICES, MAX_TOP_LOGPROBS, MOST_MTP_TOKENS, Grammar

Positive: TypeAlias = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Natural: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Fraction: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100.0, le=100.0)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Speculate: TypeAlias = Literal["auto", "off", "lookup", "memory", "prediction", "forced", "draft", "mtp"]
Mtp: TypeAlias = Literal["off", "verify", "confadapt", "static"]
MtpTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_MTP_TOKENS)]

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
# What a request may say about itself that is only written down: the log line has it.
NOTES = ("user", "safety_identifier", "metadata")
MTP_FIELDS = ("mtp", "tau", "mtp_tokens")  # how to use a model that predicts several tokens in one pass
# Fields of `Sampling` that are arguments of `SamplingParams` as they are.
_PLAIN = (
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "stop_token_ids", "ignore_eos", "n", "speculate", *MTP_FIELDS,
)  # fmt: skip


class TextContent(Struct, kw_only=True, forbid_unknown_fields=True):
    """A piece of text."""

    type: Literal["text"]
    text: str


class CacheControl(Struct, kw_only=True, forbid_unknown_fields=True):
    """Hold the prompt up to here in the cache for so long after the answer, in preference to others."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> float:
        return 3600.0 if self.ttl == "1h" else 300.0


class MarkedText(TextContent, kw_only=True, forbid_unknown_fields=True):
    """A piece of text that may say how long the prompt up to its message is to be held."""

    cache_control: CacheControl | None = None


class Prediction(Struct, kw_only=True, forbid_unknown_fields=True):
    """Text that the answer is expected to repeat for the most part: it is computed faster then, and stays the same."""

    type: Literal["content"]
    content: str | list[TextContent]

    @property
    def text(self) -> str:
        return text_of(self.content)


class FormatText(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""

    def grammar(self, call: Call) -> Grammar | None:  # noqa: ARG002
        return None


class FormatObject(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""

    def grammar(self, call: Call) -> Grammar:  # noqa: ARG002
        return Grammar("json_object")


class JsonSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    """`strict` is as good as always true: no answer leaves the schema."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class FormatSchema(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that a schema allows."""

    json_schema: JsonSchema

    def grammar(self, call: Call) -> Grammar:
        return schema_grammar(call, self.json_schema.schema)


class FormatRegex(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="regex"):
    """Text that a regular expression matches as a whole."""

    regex: str

    def grammar(self, call: Call) -> Grammar:
        return Grammar("regex", sized(call, self.regex, "response_format"))


class FormatLark(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="lark"):
    """Text of a grammar in llguidance's dialect of Lark."""

    lark: str

    def grammar(self, call: Call) -> Grammar:
        return Grammar("lark", sized(call, self.lark, "response_format"))


ResponseFormat: TypeAlias = FormatText | FormatObject | FormatSchema | FormatRegex | FormatLark


class StreamOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """`include_usage`: true for a chunk of its own, false for none; without it the last chunk has the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat completions and completions have in common. null is the same as absent."""

    model: str | None = None
    max_tokens: Natural | None = None
    min_tokens: Natural | None = None
    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    speculate: Speculate | None = None
    mtp: Mtp | None = None
    tau: Fraction | None = None
    mtp_tokens: MtpTokens | None = None
    timeout: Annotated[float, Meta(ge=0.0)] | None = None
    pace: Annotated[float, Meta(ge=0.0)] | None = None
    return_token_ids: bool | None = None
    user: str | None = None

    def sampling(self, call: Call) -> dict[str, Any]:
        """Arguments for `SamplingParams`, but for the number of tokens and log-probabilities. Raises `ApiError`."""
        config = call.server.config
        made: dict[str, Any] = {"temperature": config.temperature}
        made |= {name: value for name in _PLAIN if (value := getattr(self, name)) is not None}
        if self.n is not None and self.n > config.max_choices:
            raise refused("n", f"n may be at most {config.max_choices} here.")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > config.max_stops:
            raise refused("stop", f"stop may have at most {config.max_stops} strings here.")
        made["stop"] = stops
        if self.logit_bias is not None:
            made["logit_bias"] = _biases(self.logit_bias)
        if self.prediction is not None:
            made["prediction"] = self.prediction.text
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "stream_options are for streams: set stream to true, or leave them out.")
        set_pace(call, self.pace, self.stream)
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            problem = "Chunks are not padded at random here: use pace, which makes all of a stream's records equal."
            raise refused("stream_options.include_obfuscation", problem)
        for name in NOTES:
            if (value := getattr(self, name, None)) is not None:
                call.record.notes[name] = value
        return made

    def grammar(self, call: Call) -> Grammar | None:
        """What the answer must look like. Raises `ApiError`."""
        return None if self.response_format is None else self.response_format.grammar(call)


def set_pace(call: Call, pace: float | None, stream: bool | None) -> None:
    """Pace a stream as its request asks for. Raises `ApiError` for what is no stream, or faster than the server allows."""
    if pace is None:
        return
    least = call.server.config.pace
    if least and not 0 < pace <= least:
        raise refused("pace", f"pace must be above 0 and at most {least:g} here.")
    if not stream:
        raise refused("pace", "pace is for streams: set stream to true, or leave it out.")
    call.pace = pace


def text_of(content: str | Sequence[TextContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def schema_grammar(call: Call, schema: Mapping[str, Any]) -> Grammar:
    return Grammar("json_schema", sized(call, msgspec.json.encode(schema).decode(), "response_format"))


def sized(call: Call, text: str, param: str) -> str:
    """The text, unless it is longer than schemas may be. Raises `ApiError`."""
    most = call.server.config.schema_bytes
    if len(text.encode()) > most:
        raise refused(param, f"{param} has more than {most} bytes, which is the limit.")
    return text


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise refused("logit_bias", f"logit_bias has the key {key!r}, which is not a token id.")
    biases = {int(key): value for key, value in given.items()}
    if len(biases) < len(given):
        raise refused("logit_bias", "logit_bias has a token id twice.")
    return biases
