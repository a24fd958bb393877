"""A DataFrame job in its cell: how many rows ended and how, at what rate, the last results, and three buttons.

Owns the widget and its summary; the job is whoever satisfies `Watched`. It looks at the job from a thread, so the
job pays nothing for being watched, and it holds neither the job nor its rows: what stays after the end is a page of
text.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

import traitlets

from .history import History
from .live import LiveWidget, asset
from .protocol import (
    Asked,
    BatchState,
    BatchTraits,
    CountsBand,
    JobCommand,
    PaceBand,
    RowOutcome,
    RowResult,
)

__all__ = ["About", "BatchWidget", "Ended", "Snapshot", "Watched", "as_html", "as_text", "read"]

PROMPT_CHARACTERS = 120
ANSWER_CHARACTERS = 200
LEAST_COMMON = 12
"""Characters that prompts share before they are left out."""

_OUTCOMES: Mapping[str, RowOutcome] = {"length": "cut", "error": "failed", "skipped": "skipped"}
_STATES: Mapping[str, BatchState] = {"paused": "paused", "stopped": "stopped", "finished": "finished"}


class Ended(Protocol):
    """A row that ended."""

    @property
    def label(self) -> str:
        """What the row is called."""

    @property
    def prompt(self) -> str:
        """The first words of its prompt."""

    @property
    def answer(self) -> str:
        """The first words of its text, or of its error."""

    @property
    def finish_reason(self) -> str:
        """One of length, error, skipped; anything else is done."""


class Snapshot(Protocol):
    """A job at one moment; rates are in things a second, None is unknown."""

    @property
    def state(self) -> str:
        """One of paused, stopped, finished; anything else runs."""

    @property
    def total(self) -> int | None:
        """Rows there are."""

    @property
    def done(self) -> int:
        """Rows that ended; those of the four following counts are among them."""

    @property
    def failed(self) -> int:
        """Rows."""

    @property
    def skipped(self) -> int:
        """Rows without a prompt."""

    @property
    def truncated(self) -> int:
        """Rows whose answer ended at max_tokens."""

    @property
    def reused(self) -> int:
        """Rows that didn't run, as their answer was there."""

    @property
    def running(self) -> int:
        """Rows with the engine."""

    @property
    def rows_per_second(self) -> float:
        """Of the last moments; of all, once the job has ended."""

    @property
    def tokens_per_second(self) -> float:
        """As `rows_per_second`."""

    @property
    def elapsed_s(self) -> float:
        """Since the beginning."""

    @property
    def left_s(self) -> float | None:
        """Until the end."""

    @property
    def recent(self) -> Sequence[Ended]:
        """The rows that ended last, the latest first."""


class Watched(Protocol):
    """A job; every member may be used from any thread and returns at once."""

    def snapshot(self) -> Snapshot:
        """How far it is."""

    def pause(self) -> None:
        """Start no more rows for now."""

    def resume(self) -> None:
        """Start rows again."""

    def stop(self) -> None:
        """End it early."""


@dataclass(frozen=True, slots=True)
class About:
    """What is said of a job beside its numbers.

    Parameters
    ----------
    title : str
        What it does.
    failure : callable
        Why no more rows can run, once that is so.
    command : str
        What helps then.
    """

    title: str
    failure: Callable[[], str | None]
    command: str


class BatchWidget(LiveWidget):
    """A live view of one job, until `end`. It holds the job weakly: whoever runs it keeps it."""

    _kind = "batch view"
    _esm = asset("batch.js")
    _css = asset("batch.css")

    job = traitlets.Dict().tag(sync=True)
    counts = traitlets.Dict().tag(sync=True)
    pace = traitlets.Dict().tag(sync=True)
    tokens = traitlets.Dict().tag(sync=True)
    results: traitlets.List[RowResult] = traitlets.List().tag(sync=True)

    def __init__(self, job: Watched, about: About) -> None:
        self._watched, self._about = weakref.ref(job), about
        self._past = History()
        self._common: str | None = None
        self._over = False
        self._last = self._look(job)
        super().__init__()

    def end(self) -> None:
        """Show how the job ended, for good. May be called twice."""
        if self._ending.alive:
            self._ending()
            self._publish()
            self._over = True
            self._keep(now=True)

    def _act(self, asked: Asked) -> None:
        job = self._watched()
        if job is None or not isinstance(asked, JobCommand):
            return
        match asked.action:
            case "pause":
                job.pause()
            case "resume":
                job.resume()
            case "stop":
                job.stop()
        self._publish()

    def _read(self) -> Mapping[str, Any]:
        job = self._watched()
        if job is not None and not self._over:
            self._last = self._look(job)
        return self._last

    def _look(self, job: Watched) -> BatchTraits:
        now = read(job, self._about)
        if now["job"]["state"] == "running":
            self._past.add(now["pace"]["tokens"] or 0.0, 0.0)
        past = self._past.band()
        return {
            **now,
            "tokens": {"samples": past["decode"], "peak": past["decode_peak"]},
            "results": self._own_words(now["results"]),
        }

    def _own_words(self, results: list[RowResult]) -> list[RowResult]:
        """Leave out how all prompts of the job begin: the title says it, and what is a row's own comes after."""
        prompts = {result["prompt"] for result in results if result["prompt"]}
        if self._common is not None or len(prompts) > 1:
            self._common = functools.reduce(_common, prompts, self._common)
        skip = 0 if self._common is None else self._common.rfind(" ") + 1
        return [_short(result, skip if skip >= LEAST_COMMON else 0) for result in results]

    def _as_text(self) -> str:
        return as_text(self._last)

    def _as_html(self) -> str:
        return as_html(self._last)


def read(job: Watched, about: About) -> BatchTraits:
    """Look at a job once; the past of its token rate is not known here."""
    now = job.snapshot()
    state: BatchState = _STATES.get(now.state, "running")
    ended = state in {"stopped", "finished"}
    failure = about.failure()
    if failure is not None and (not ended or now.failed):
        state = "error"
    return {
        "job": {
            "state": state,
            "title": about.title,
            "failure": failure if state == "error" else None,
            "command": about.command,
            "ended": time.strftime("%H:%M") if ended else None,
        },
        "counts": _counts(now),
        "pace": _pace(now, state, ended=ended),
        "tokens": {"samples": [], "peak": 0.0},
        "results": [_result(row) for row in now.recent],
    }


def as_text(job: BatchTraits) -> str:
    """Return the job in one line: ``200 rows · 196 done · 3 failed · 1 skipped · 12.3 s``."""
    counts, state = job["counts"], job["job"]["state"]
    handled = counts["done"] + counts["failed"] + counts["skipped"]
    whole = state == "finished" and handled == counts["total"]
    rows = f"{counts['total']:,} row{'' if counts['total'] == 1 else 's'}"
    parts = [rows if whole else f"{handled:,} of {rows}", f"{counts['done']:,} done"]
    parts += [f"{counts[name]:,} {name}" for name in ("failed", "skipped") if counts[name]]
    match state:
        case "finished":
            parts.append(_span(job["pace"]["elapsed"]))
        case "stopped":
            parts.append(f"stopped after {_span(job['pace']['elapsed'])}")
        case "error":
            parts.append(job["job"]["failure"] or "failed")
        case _:
            parts.append(state)
    return " · ".join(parts)


def as_html(job: BatchTraits) -> str:
    """Return the same as HTML that needs nothing else."""
    style = "margin:0;padding:2px 0;font:13px/1.5 system-ui,sans-serif;font-variant-numeric:tabular-nums"
    return f'<p class="mlx-nb-batch-snapshot" style="{style}">{escape(as_text(job))}</p>'


def _counts(now: Snapshot) -> CountsBand:
    return {
        "total": now.done + now.running if now.total is None else now.total,
        "done": now.done - now.failed - now.skipped,
        "failed": now.failed,
        "skipped": now.skipped,
        "running": now.running,
        "cut": now.truncated,
        "reused": now.reused,
    }


def _pace(now: Snapshot, state: BatchState, *, ended: bool) -> PaceBand:
    """Rounded to what a reader can see, so that a change nobody would notice is not sent."""
    rows = now.rows_per_second
    return {
        "rows": round(rows, 4 if rows < 0.1 else 2 if rows < 1 else 1) if rows else None,
        "tokens": round(now.tokens_per_second, 1) or None,
        "elapsed": round(now.elapsed_s, 1) if ended else float(int(now.elapsed_s)),
        "left": None if now.left_s is None or state != "running" else float(round(now.left_s)),
    }


def _result(row: Ended) -> RowResult:
    return {
        "row": row.label,
        "prompt": row.prompt,
        "answer": row.answer,
        "outcome": _OUTCOMES.get(row.finish_reason, "done"),
    }


def _common(one: str | None, other: str) -> str:
    """How two texts begin."""
    if one is None:
        return other
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(one, other, key=len) if length is None else one[:length]


def _short(result: RowResult, skip: int) -> RowResult:
    prompt = f"… {result['prompt'][skip:]}" if skip and result["prompt"] else result["prompt"]
    return {**result, "prompt": prompt[:PROMPT_CHARACTERS], "answer": result["answer"][:ANSWER_CHARACTERS]}


def _span(seconds: float) -> str:
    """``12.3 s``, ``4 min 46 s``, ``2 h 05 min``."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
