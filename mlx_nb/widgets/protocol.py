"""What the widgets and the browser say to each other; js/src/protocol.ts mirrors it name by name.

Owns the wire types and the check of what arrives from the browser, one section a widget. State travels as synced
traits, one for each part of a widget, so that only the parts that changed are sent; commands travel as custom
messages. Knows nothing of engines, traitlets or HTML. `js/test/fixtures/protocol.json` is checked by both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

MonitorState = Literal["loading", "running", "idle", "paused", "unloaded", "stopped", "error"]
RequestPhase = Literal["waiting", "prefill", "decode"]
Command = Literal["pause", "resume", "abort_all", "clear_cache", "stop", "restart"]
BatchState = Literal["running", "paused", "stopped", "finished", "error"]
RowOutcome = Literal["done", "cut", "failed", "skipped"]
JobAction = Literal["pause", "resume", "stop"]
AnswerState = Literal["running", "finished", "stopped", "error"]
ShownPart = Literal["answer", "reasoning", "tool", "marker"]
ChatState = Literal["loading", "running", "idle", "stopped", "error"]
ChatAction = Literal["stop", "regenerate", "dismiss", "reset", "whole"]
TurnEnding = Literal["waiting", "answering", "done", "length", "stopped", "failed"]

HISTORY_SECONDS = 120
"""Samples of a sparkline, one a second."""

MAX_ROWS = 100
"""Requests listed; the others are only counted, so that a message stays small."""


class EngineBand(TypedDict):
    """Who runs, and what to do when nothing does; `command` helps then, and a button if it `can_restart`.

    With `workers` the rows are a cluster's workers: `done` of `total` are rows of their partitions.
    """

    state: MonitorState
    model: str
    precision: str
    backend: str
    failure: str | None
    command: str
    can_restart: bool
    notice: str | None
    workers: bool


class LoadBand(TypedDict):
    """Tokens a second and counts; `slots` is how many rows run at once, None when unknown."""

    decode: float
    prefill: float
    running: int
    waiting: int
    finished: int
    slots: int | None


class HistoryBand(TypedDict):
    """Oldest sample first; None for a second nobody looked. The peaks are of the widget's whole life."""

    decode: list[float | None]
    prefill: list[float | None]
    decode_peak: float
    prefill_peak: float


class MemoryBand(TypedDict):
    """Bytes; None when the engine does not know. `other` is active memory that has no better name."""

    weights: int | None
    kv: int | None
    prefix: int | None
    other: int | None
    pool: int | None
    limit: int | None


class PrefixBand(TypedDict):
    """The prefix cache; `hit_rate` is a fraction, None before the first lookup."""

    enabled: bool
    entries: int
    bytes: int | None
    hit_rate: float | None
    tokens_saved: int


class RequestRow(TypedDict):
    """What stays the same while a request lives."""

    id: str
    prompt: str


class RequestProgress(TypedDict):
    """What moves; one for each row of RequestsBand.rows, in the same order."""

    phase: RequestPhase
    done: int
    total: int
    rate: float | None
    elapsed: float
    cached: int


class MonitorTraits(TypedDict):
    """Every synced trait of the monitor; `hidden_requests` counts those beyond MAX_ROWS."""

    engine: EngineBand
    load: LoadBand
    history: HistoryBand
    memory: MemoryBand
    prefix: PrefixBand
    rows: list[RequestRow]
    progress: list[RequestProgress]
    hidden_requests: int


class JobBand(TypedDict):
    """What runs over which rows, and why it ended; `command` brings a failed engine back."""

    state: BatchState
    title: str
    failure: str | None
    command: str
    ended: str | None


class CountsBand(TypedDict):
    """Rows. `failed` and `skipped` aren't among the `done`; `cut` at max_tokens and `reused` ones are."""

    total: int
    done: int
    failed: int
    skipped: int
    running: int
    cut: int
    reused: int


class PaceBand(TypedDict):
    """Rows and tokens a second, of the last moments or (ended) of the whole job; seconds; None when unknown."""

    rows: float | None
    tokens: float | None
    elapsed: float
    left: float | None


class TokensBand(TypedDict):
    """Tokens a second, oldest sample first; None for a second nobody looked. The peak is of the whole job."""

    samples: list[float | None]
    peak: float


class RowResult(TypedDict):
    """A row that ended; `answer` is the error where there is one."""

    row: str
    prompt: str
    answer: str
    outcome: RowOutcome


class BatchTraits(TypedDict):
    """Every synced trait of a job's view; the newest of the `results` is the first."""

    job: JobBand
    counts: CountsBand
    pace: PaceBand
    tokens: TokensBand
    results: list[RowResult]


class ChatHead(TypedDict):
    """Who answers; `problem` says why nobody does, and `command`, where there is one, mends it."""

    state: ChatState
    model: str
    problem: str | None
    command: str | None
    takes_images: bool
    can_think: bool


class ChatImage(TypedDict):
    """A small picture of what was attached; `src` is a data URI of a PNG."""

    name: str
    src: str


class TurnStatus(TypedDict):
    """How an answer is doing: seconds of thinking, and the oldest turns that its prompt had no room for."""

    ending: TurnEnding
    problem: str | None
    thought_s: float | None
    left_out: int


class ChatTurn(TypedDict):
    """A question and what there is of its answer."""

    key: str
    question: str
    images: list[ChatImage]
    answer: str
    reasoning: str
    status: TurnStatus


class TurnGrowth(TypedDict):
    """What came to the end of a turn's texts."""

    key: str
    answer: str
    reasoning: str
    status: TurnStatus


class ChatTalk(TypedDict):
    """What changed since revision `base`: all `keys` in order, turns that are new, and turns that grew.

    With `base` 0 it is everything. A view that is not at `base` asks for that.
    """

    base: int
    revision: int
    keys: list[str]
    turns: list[ChatTurn]
    grown: list[TurnGrowth]


class ChatFigures(TypedDict):
    """Of the last answer, or the one that is being written: tokens a second, seconds, tokens; None if unknown."""

    rate: float | None
    first_s: float | None
    prompt: int | None
    cached: int | None
    output: int | None


class ChatSettings(TypedDict):
    """System prompt and sampling as typed, and for each that isn't valid why; the last valid value then holds."""

    values: dict[str, str]
    problems: dict[str, str]


class ChatTraits(TypedDict):
    """Every synced trait of the chat panel."""

    head: ChatHead
    talk: ChatTalk
    figures: ChatFigures
    settings: ChatSettings


class AnswerBand(TypedDict):
    """What is shown token by token; `note` says what goes on before the first, `k` how many alternatives each has."""

    state: AnswerState
    title: str
    note: str
    k: int


class TokenFigures(TypedDict):
    """Of all tokens so far; the entropies in bits. None before the first, or where one is infinite."""

    mean: float | None
    perplexity: float | None
    mean_bits: float | None
    max_bits: float | None


class Alternative(TypedDict):
    """A token that might have been, and its probability."""

    text: str
    p: float


class TokenItem(TypedDict):
    """One token of an answer.

    `rank` is its place in `top` (1 is the likeliest), None when it isn't among them; `bits` the least entropy that
    the known probabilities leave possible; `text` is empty for a token that ends within a character.
    """

    text: str
    part: ShownPart
    p: float
    rank: int | None
    bits: float
    top: list[Alternative]


class TokensTraits(TypedDict):
    """Every synced trait of the token view. `tokens` is sent as a whole when asked for, and at the end."""

    answer: AnswerBand
    figures: TokenFigures
    tokens: list[TokenItem]


class NewTokens(TypedDict):
    """The only message to the token view: tokens that follow the first `start` ones."""

    kind: Literal["tokens"]
    start: int
    tokens: list[TokenItem]


@dataclass(frozen=True, slots=True)
class ViewChange:
    """A view can be seen (`open`), or no longer; a message of a lower `order` than one seen is late."""

    view: str
    order: int
    open: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """The abort button of one request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """A button that concerns the whole engine."""

    command: Command


@dataclass(frozen=True, slots=True)
class JobCommand:
    """A button of a job."""

    action: JobAction


@dataclass(frozen=True, slots=True)
class ChatSend:
    """A question, in place of the turn `replaces` and those after it if that is given.

    `images` are file names; their bytes travel as the message's buffers, in the same order, and are `data` then. An
    edited question keeps the images it had.
    """

    text: str
    replaces: str | None
    images: tuple[str, ...]
    data: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A button of the chat panel; "whole" asks for all turns again."""

    action: ChatAction


@dataclass(frozen=True, slots=True)
class ChatSet:
    """Settings as typed."""

    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class AllTokens:
    """A view that has missed tokens asks for all of them."""


Asked = Abort | EngineCommand | JobCommand | AllTokens | ChatSend | ChatCommand | ChatSet
"""What a view of any widget asks for."""

Message = ViewChange | Asked

_COMMANDS: Mapping[object, Command] = {
    "pause": "pause", "resume": "resume", "abort_all": "abort_all", "clear_cache": "clear_cache", "stop": "stop",
    "restart": "restart",
}  # fmt: skip
_JOB_ACTIONS: Mapping[object, JobAction] = {"pause": "pause", "resume": "resume", "stop": "stop"}
_CHAT_ACTIONS: Mapping[object, ChatAction] = {
    "stop": "stop", "regenerate": "regenerate", "dismiss": "dismiss", "reset": "reset", "whole": "whole",
}  # fmt: skip


def parse_message(content: object) -> Message | None:
    """Return what the browser asked for, or None when it is nothing this version knows."""
    match content:
        case {"kind": "view", "view": str(view), "order": int(order), "open": bool(is_open)}:
            return ViewChange(view, order, is_open)
        case {"kind": "abort", "request_id": str(request_id)}:
            return Abort(request_id)
        case {"kind": "command", "command": str(name)} if name in _COMMANDS:
            return EngineCommand(_COMMANDS[name])
        case {"kind": "job", "action": str(name)} if name in _JOB_ACTIONS:
            return JobCommand(_JOB_ACTIONS[name])
        case {"kind": "tokens"}:
            return AllTokens()
        case _:
            return _parse_chat(content)


def _parse_chat(content: object) -> Message | None:
    match content:
        case {"kind": "chat", "action": str(name)} if name in _CHAT_ACTIONS:
            return ChatCommand(_CHAT_ACTIONS[name])
        case {
            "kind": "chat_send",
            "text": str(text),
            "replaces": None | str() as replaces,
            "images": list(names),
        }:
            return ChatSend(text, replaces, tuple(map(str, names)))
        case {"kind": "chat_set", "values": dict(values)}:
            return ChatSet({str(name): str(value) for name, value in values.items()})
        case _:
            return None
