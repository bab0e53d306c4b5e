"""The nouns of the engine: plain data, no torch, no behaviour beyond validation."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from obole.errors import InvalidRequest

MAX_STOPS = 64
MAX_TOP_LOGPROBS = 100
MAX_CHOICES = 128
MAX_HOLD_SECONDS = 86_400.0


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the limit of the context or the KV pool
    CANCELLED = "cancelled"


class Status(enum.Enum):
    WAITING = "waiting"  # in the queue: owns no blocks
    LOADING = "loading"  # waits for blocks to come up from RAM or SSD: owns blocks, takes part in no step
    RUNNING = "running"  # takes part in steps: owns blocks
    FINISHED = "finished"


class Source(enum.StrEnum):
    """Who proposed a token of an answer. The model chooses every one of them; a draft is only ever confirmed."""

    MODEL = "model"  # nobody: it came from the model's own pass
    LOOKUP = "lookup"  # the sequence's own prompt and output
    MEMORY = "memory"  # earlier prompts and answers of the same tenant
    PREDICTION = "prediction"  # the text that the caller expects back
    FORCED = "forced"  # a grammar left no choice
    DRAFT = "draft"  # a smaller model
    MTP = "mtp"  # the model itself, in an earlier place: what it predicted several tokens ahead


class Tier(enum.StrEnum):
    """Where a cached block was found, fastest first."""

    DEVICE = "device"  # the pool that the model computes in
    RAM = "ram"
    SSD = "ssd"


class NamedBlock(NamedTuple):
    """A block of the pool and what its contents go by; `owner`: 16 bytes that stand for the tenant."""

    key: bytes
    owner: bytes
    block: int


SPECULATE = ("auto", "off", "lookup", "memory", "prediction", "forced", "draft", "mtp")
MTP = ("off", "verify", "confadapt", "static")
LOSSY = ("confadapt", "static")
MOST_MTP_TOKENS = 64
DEFAULT_TAU, DEFAULT_MTP_TOKENS = 0.9, 16


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like. `kind`: "json_schema", "json_object" (no text), "regex" or "lark"."""

    kind: str
    text: str = ""


class Constraint(Protocol):
    """What may come next in one sequence, which owns it: a grammar and how far the answer has come in it."""

    def allowed(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Bits (ceil(vocabulary / 32),): bit i % 32 of word i // 32 is set where token i may come. Good until the next call."""

    def accept(self, token_id: int) -> None:
        """The token was chosen; it was one of those allowed."""

    def forced(self) -> list[int]:
        """Tokens that must come next whatever the model says; may be empty."""

    @property
    def over(self) -> bool:
        """Nothing may follow: the answer ends here."""


class Distribution(NamedTuple):
    """What a token is drawn from: the ids that may come, ascending, and their probabilities, which sum to one. Never empty."""

    ids: np.ndarray[Any, np.dtype[np.int64]]
    probabilities: np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a sequence's newest one, and who proposed each; never empty.

    The last `masks` tokens are no proposals but masks, at which the model predicts what comes after them, and have no source.
    With a `threshold` that is accepted unverified, from the first on and as long as the model gives each at least this
    probability; with None it only serves to draft from.

    `distributions`: what each token was drawn from, where it is to be accepted or drawn anew by that; else None.
    """

    tokens: list[int]
    sources: list[Source]
    distributions: list[Distribution] | None = None
    masks: int = 0
    threshold: float | None = None

    @property
    def proposed(self) -> int:
        """Tokens that are proposals."""
        return len(self.sources)

    def first(self, count: int) -> Draft:
        drawn = self.distributions
        masks = max(0, min(count, len(self.tokens)) - self.proposed)
        return Draft(self.tokens[:count], self.sources[:count], None if drawn is None else drawn[:count], masks, self.threshold)


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor of a checkpoint as it lies in the file.

    `kind` is a GGUF type name ("F32", "F16", "BF16", "Q4_0", ..., "Q6_K"); `shape` is row-major with the input features
    last, (out, in) for a matrix; `data` is uint8 (rows, bytes of a row), read-only and usually a memory map.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Order of the steps (see `engine/sampler.py`): repetition, presence and frequency penalties; logit bias; bans (end of
    sequence before `min_tokens`); temperature; top-k; top-p; min-p; then the largest of (log-probability + Gumbel noise),
    the lowest id winning ties. Log-probabilities reported are the model's own, before all of these.
    """

    max_tokens: int | None = None  # None: as many as the context allows; 0: none (score the prompt)
    min_tokens: int = 0  # end-of-sequence, stop tokens and stop strings do not count before
    temperature: float = 0.0  # below 1e-5: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0  # 0: greedy
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None  # None: the engine draws one and reports it in the receipt
    stop: tuple[str, ...] = ()  # text that ends the answer and is not part of it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # number of alternatives beside the chosen token; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt
    speculate: str | None = None  # which drafts to try, one of `SPECULATE`; None: as the engine is set. No answer depends on it
    mtp: str | None = None  # how to use a model that predicts several tokens at once, one of `MTP`; None: as `speculate` says
    tau: float | None = None  # confadapt: least probability of a token taken unverified, and of those before it; None: 0.9
    mtp_tokens: int | None = None  # with mtp: tokens of a pass at most; None: 16, or what the model was taught if that is less
    prediction: str | tuple[int, ...] | None = None  # text that is expected back, mostly unchanged: a source of drafts
    grammar: Grammar | None = None  # what the answer must look like
    hold_seconds: float | None = None  # keep the prompt's cached blocks so long after the answer, in preference to others
    hold_messages: int | None = None  # of a chat, the messages up to which; None: the whole prompt
    shown_token_ids: tuple[int, ...] = ()  # control tokens that the text shows, such as those around tool calls

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, 2**63 - 1, optional=True)
        if self.tau is not None:
            _number("tau", self.tau, 0.0, 1.0)
        _integer("mtp_tokens", self.mtp_tokens, 1, MOST_MTP_TOKENS, optional=True)
        self._check_sources()
        _integer("min_tokens", self.min_tokens, 0, 2**63 - 1)
        _number("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, -1, 2**63 - 1)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0:
            raise InvalidRequest("repetition_penalty", "repetition_penalty must be greater than 0.")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _integer("n", self.n, 1, MAX_CHOICES)
        _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS, optional=True)
        if self.hold_seconds is not None:
            _number("hold_seconds", self.hold_seconds, 0.0, MAX_HOLD_SECONDS)
        _integer("hold_messages", self.hold_messages, 0, 2**31 - 1, optional=True)
        if self.prediction is not None and not isinstance(self.prediction, str):
            object.__setattr__(self, "prediction", _items("prediction", self.prediction))
            for token in self.prediction:
                _integer("prediction", token, 0, 2**31 - 1)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest("grammar", f"grammar must be a Grammar, not {type(self.grammar).__name__}.")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos", "ignore_eos must be true or false.")
        stop: object = self.stop  # a single string is what most callers have
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _items("stop", stop))
        if len(self.stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidRequest("stop", f"stop must be at most {MAX_STOPS} strings, none of them empty.")
        for name in ("stop_token_ids", "shown_token_ids"):
            object.__setattr__(self, name, _items(name, getattr(self, name)))
            for token in getattr(self, name):
                _integer(name, token, 0, 2**31 - 1)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest("logit_bias", "logit_bias must map token ids to numbers.")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens}).")

    def _check_sources(self) -> None:
        if self.speculate is not None and self.speculate not in SPECULATE:
            raise InvalidRequest("speculate", f"speculate must be one of {', '.join(SPECULATE)}, not {self.speculate!r}.")
        if self.mtp is not None and self.mtp not in MTP:
            raise InvalidRequest("mtp", f"mtp must be one of {', '.join(MTP)}, not {self.mtp!r}.")
        wanted = ("mtp", "auto") if self.mtp == "verify" else ("off", "auto")
        if self.mtp not in (None, "off") and self.speculate not in (None, *wanted):
            raise InvalidRequest("speculate", f"With mtp {self.mtp}, speculate must be {' or '.join(wanted)}: or leave it out.")
        if self.tau is not None and self.mtp != "confadapt":
            raise InvalidRequest("tau", "tau is for mtp confadapt: set that, or leave tau out.")
        if self.mtp_tokens is not None and self.mtp in (None, "off"):
            raise InvalidRequest("mtp_tokens", f"mtp_tokens is for mtp {', '.join(MTP[1:])}: set that, or leave it out.")
        if self.mtp == "off" and self.speculate == "mtp":
            raise InvalidRequest("mtp", "speculate is mtp, but mtp is off: set only one of them.")

    @property
    def lossy(self) -> bool:
        """Whether tokens are taken that no ordinary pass has confirmed."""
        return self.mtp in LOSSY


def _items(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidRequest(name, f"{name} must be a list, not {type(value).__name__}.")
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, f"{name} must be a whole number from {low} to {high}, not {value!r}.")


def _number(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not good:
        above = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
        raise InvalidRequest(name, f"{name} must be a finite number {above}, not {value!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked. `eos_ids` are the model's; `tenant` separates caches; `seed` is always set."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int] = frozenset()
    tenant: str = ""
    hold_tokens: int = 0  # leading tokens of the prompt to which `params.hold_seconds` applies
    prediction_ids: tuple[int, ...] = ()  # `params.prediction` as tokens
    arrival: float = 0.0  # seconds on the engine's clock


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The model's own log-probability (natural) of a token, and of the most likely ones at that place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # most likely first; ties: lowest id first


class TextTracker(Protocol):
    """Turns the tokens of one sequence into text, one at a time, and watches for stop strings (`text/`)."""

    def push(self, token_id: int, *, stops: bool) -> bool:
        """Take one token; True when a stop string is complete (only looked for when `stops`)."""

    def take(self) -> str:
        """Text that is final since the last call; what may still become a stop string is held back."""

    def flush(self) -> None:
        """No more tokens: release what was held back."""


class Sequence:
    """One answer in the making: its tokens, and a count of those already computed.

    The scheduler owns `status`, `num_computed`, `tokens`; the cache manager owns `tables`, `keys` and
    `num_registered`; both fill in the receipt's counters where the work is done. The controller hangs `draft` on a
    sequence before a step is planned, the scheduler may shorten it, and takes it off when the step is settled.
    """

    __slots__ = (
        "request", "index", "seed", "tokens", "prompt_len", "max_len", "min_len", "stop_ids", "status", "num_computed",
        "tables", "keys", "num_registered", "parent", "text", "logprobs", "prompt_logprobs", "finish_reason", "tally", "dead",
        "draft", "constraint", "speculation", "private", "stride",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        index: int,
        seed: int,
        max_len: int,
        text: TextTracker | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        params = request.params
        self.request = request
        self.index = index  # which of the n choices
        self.seed = seed
        self.tokens: list[int] = list(request.prompt_ids)  # prompt, then output
        self.prompt_len = len(request.prompt_ids)
        self.max_len = max_len  # tokens (prompt + output) at which generation ends with "length"
        self.min_len = self.prompt_len + params.min_tokens
        eos = frozenset() if params.ignore_eos else request.eos_ids
        self.stop_ids: frozenset[int] = eos | frozenset(params.stop_token_ids)
        self.status = Status.WAITING
        self.num_computed = 0  # tokens[:num_computed] have their KV in the cache
        self.tables: list[list[int]] = []  # per cache group: block ids in order; -1 where a window has passed
        self.keys: list[bytes] = []  # hash chain of the full blocks known so far
        self.num_registered = 0  # leading blocks already offered to the prefix index
        self.parent: Sequence | None = None  # the first choice, whose prompt is computed once for all n
        self.text = text
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # from the second prompt token on: nothing stands before the first
        self.finish_reason: FinishReason | None = None
        self.tally = Tally()
        self.dead = False  # cancelled while a step that contains it is under way
        self.draft: Draft | None = None  # of the step under way or about to be planned
        self.constraint = constraint  # advanced by the runner with each token it chooses
        self.speculation: object | None = None  # the controller's own, as long as the sequence lives
        # tokens that a step may yield, which the next one computes
        self.stride = (params.mtp_tokens or DEFAULT_MTP_TOKENS) if params.lossy else 1
        self.private = False  # its tenant wants everything deleted: nothing of it is kept for others to use

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet: the rows that the next step has for it, its draft aside."""
        return len(self.tokens) - self.num_computed


@dataclass(slots=True)
class Tally:
    """A receipt while it is being written. Times are seconds on the engine's clock; None: not yet."""

    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached: int = -1  # prompt tokens found in the cache when first scheduled; -1: not yet scheduled
    cached_by_tier: dict[Tier, int] = field(default_factory=dict)  # of these, those that came up from RAM or SSD
    load_seconds: float = 0.0  # spent waiting for blocks to come up
    held: int = 0  # prompt tokens held in the pool when the answer had ended
    unread: int = 0  # prompt tokens that were never computed, because the request was cancelled
    recomputed: int = 0  # tokens computed again after preemption
    preemptions: int = 0
    passes: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    accepted: dict[Source, int] = field(default_factory=dict)  # tokens of the answer that were drafted, by source
    drafted: dict[Source, int] = field(default_factory=dict)
    draftless_passes: int = 0  # that chose a token without a draft
    draft_seconds: float = 0.0
    saved_seconds: float = 0.0  # estimate
    resampled: bool = False  # drafts were accepted or drawn anew by what they were drawn from
    masks: int = 0  # rows at which tokens were predicted ahead
    confidences: list[float] = field(default_factory=list)  # of the tokens taken unverified


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where the tokens of one answer came from, what was read from memory for them, and how long it took.

    Sums: cached_tokens + computed_tokens + unread_tokens = prompt_tokens, unread being those that a cancelled request never
    came to; sum(sources) = output_tokens; queued + prefill + decode = total seconds. `weight_bytes` is this answer's share,
    by rows, of what its forward passes read.

    `cached_by_tier`: cached tokens by where they were found, "device", "ram" and "ssd"; `load_seconds`: of those in the queue,
    what was spent waiting for blocks to come up. `held_tokens`: leading tokens of the prompt that the pool keeps in preference
    to others for the time asked for; what else was to be held is kept in lower tiers only, if there are any.

    `sources`: tokens of the answer by who proposed them; `drafted`: tokens proposed, by source, of which `rejected` were not
    what the model chose (or came after the end). `draftless_passes`: passes that chose a token without a draft.
    `draft_seconds`: time spent on finding drafts; `saved_seconds`: estimate of the time that the same tokens would have taken
    one by one, less the time that they took, with that spent on finding drafts.

    `acceptance`: "exact" for an answer that drafts had no influence on; "distribution" where a draft model's tokens were
    accepted or drawn anew by the probabilities of both models: without them another answer, just as likely, may have come;
    "lossy" where tokens predicted ahead were taken unverified, and one by one the model might have said something else.
    `confidences`: the probabilities that it gave these, in order. `mask_rows`: rows at which it predicted ahead.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    unread_tokens: int
    output_tokens: int
    sources: Mapping[str, int]
    forward_passes: int
    weight_bytes: int
    kv_bytes: int
    preemptions: int
    recomputed_tokens: int
    queued_seconds: float
    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    seed: int
    drafted: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    draftless_passes: int = 0
    draft_seconds: float = 0.0
    saved_seconds: float = 0.0
    acceptance: str = "exact"
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0
    held_tokens: int = 0
    mask_rows: int = 0
    confidences: tuple[float, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One step: for each sequence, the tokens [start, start + rows) are computed, its draft, masks and all, counted as the last
    ones.

    `samples[i]` says that the newest token of sequence i is among them, so that the step yields the next one, and with
    a draft up to one more than was drafted.
    Before anything is written, and in this order: `demotions` are blocks whose contents the pool has given up, to be kept in a
    lower tier; `promotions` are blocks and the bytes to be laid into them, which have come up from one; `copies` are (from, to)
    block ids to copy (copy on write). A plan may consist of promotions alone.
    Parallel lists rather than records: a plan for 256 sequences must cost well under a millisecond.
    """

    sequences: list[Sequence]
    starts: list[int]
    rows: list[int]
    samples: list[bool]
    copies: list[tuple[int, int]]
    total_rows: int = 0
    demotions: list[NamedBlock] = field(default_factory=list)
    promotions: list[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]] = field(default_factory=list)


class Ahead(NamedTuple):
    """A token predicted at a mask, and the probability that the model gave it there."""

    token: int
    confidence: float


@dataclass(slots=True)
class StepResult:
    """What a step yielded, in the order of the plan; `tokens[i]` is empty where nothing was sampled."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprob] | None]  # beside `tokens`, where asked for
    prompt_logprobs: list[list[TokenLogprob] | None]  # the next ones in order, from the second prompt token on
    weight_bytes: int = 0
    kv_bytes: list[int] = field(default_factory=list)
    distributions: list[list[Distribution]] = field(default_factory=list)  # beside `tokens`, from a runner that keeps them
    confidences: dict[int, list[float]] = field(default_factory=dict)  # by index in the plan, beside `tokens`, where lossy
    ahead: dict[int, list[Ahead]] = field(default_factory=dict)  # by index in the plan: what was predicted after its tokens


@dataclass(frozen=True, slots=True)
class Event:
    """News of one sequence after a step."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    sources: tuple[Source, ...] = ()  # of each token
