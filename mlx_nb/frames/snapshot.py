"""How far a job is: counted row by row, and read from any thread as one frozen value."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .outcome import Outcome

__all__ = ["Recent", "Snapshot", "State", "Tally"]

State = Literal["new", "running", "paused", "stopped", "finished"]

RECENT = 20
"""Last results that a snapshot shows."""
WORDS = 400
"""Characters of each that it shows."""
RATE_S = 10.0
"""Seconds at work that rates look back on."""
MARK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Recent:
    """A row that ended: what it is called, the first words of its prompt, and of its text or error."""

    label: str
    prompt: str
    answer: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A job at one moment.

    Attributes
    ----------
    state : {"new", "running", "paused", "stopped", "finished"}
        "stopped" is ended early: by `Job.stop`, an interrupt, a cancellation or a fault.
    total : int or None
        Rows there are, if known.
    done : int
        Rows that have an outcome; `failed`, `skipped`, `truncated` (by max_tokens) and `reused` are among them.
    reused : int
        Rows whose outcome was another row's, or the checkpoint's.
    running : int
        Rows that the engine has in its batch.
    rows_per_second, tokens_per_second : float
        Over the last ten seconds at work; of a job that ended, over all of them.
    elapsed_s : float
        Since the job began, pauses included.
    left_s : float or None
        At the present rate; None if that can't be told.
    recent : tuple of Recent
        The last results, latest first.
    """

    state: State
    total: int | None
    done: int
    failed: int
    skipped: int
    truncated: int
    reused: int
    running: int
    rows_per_second: float
    tokens_per_second: float
    elapsed_s: float
    left_s: float | None
    recent: tuple[Recent, ...]


class Tally:
    """Counts outcomes. Written by the job's thread (and `turn` by any), read by any.

    Parameters
    ----------
    total : int, optional
        Rows there are.
    label : callable
        What the row at a position is called.
    """

    def __init__(self, total: int | None, label: Callable[[int], str]) -> None:
        self.state: State = "new"
        self._total, self._label = total, label
        self._lock = threading.Lock()
        self._done = self._failed = self._skipped = self._truncated = self._reused = self._tokens = 0
        self._recent: deque[tuple[int, str, Outcome]] = deque(maxlen=RECENT)
        self._began: float | None = None
        self._ended: float | None = None
        self._idle = 0.0
        self._idle_since: float | None = None
        self._marks: deque[tuple[float, int, int]] = deque()

    def turn(self, state: State) -> bool:
        """Go over to a state; False from one that is final."""
        with self._lock:
            if self.state in ("stopped", "finished"):
                return False
            now = time.monotonic()
            if state == "running" and self._began is None:
                self._began = now
                self._marks.append((0.0, 0, 0))
            if state == "paused" and self._idle_since is None:
                self._idle_since = now
            elif state != "paused" and self._idle_since is not None:
                self._idle += now - self._idle_since
                self._idle_since = None
            if state in ("stopped", "finished"):
                self._ended = now
            self.state = state
            return True

    def count(self, position: int, prompt: str, outcome: Outcome, *, reused: bool) -> None:
        """Take note of a row's end."""
        reason = outcome.finish_reason
        if reason == "abort":
            return
        with self._lock:
            self._done += 1
            if reason == "length":
                self._truncated += 1
            elif reason == "error":
                self._failed += 1
            elif reason == "skipped":
                self._skipped += 1
            if reused:
                self._reused += 1
            else:
                self._tokens += outcome.completion_tokens or 0
            self._recent.append((position, prompt, outcome))
            worked = self._worked(time.monotonic())
            if worked - self._marks[-1][0] >= MARK_EVERY_S:
                self._marks.append((worked, self._done, self._tokens))
                while len(self._marks) > 2 and self._marks[1][0] < worked - RATE_S:
                    self._marks.popleft()

    def snapshot(self, running: int) -> Snapshot:
        """What has been counted."""
        with self._lock:
            now = self._ended or time.monotonic()
            rows, tokens = self._rates(self._worked(now))
            left = None if self._total is None else max(0, self._total - self._done)
            return Snapshot(
                state=self.state,
                total=self._total,
                done=self._done,
                failed=self._failed,
                skipped=self._skipped,
                truncated=self._truncated,
                reused=self._reused,
                running=running,
                rows_per_second=rows,
                tokens_per_second=tokens,
                elapsed_s=0.0 if self._began is None else now - self._began,
                left_s=0.0 if left == 0 else left / rows if left is not None and rows > 0 else None,
                recent=tuple(map(self._shown, reversed(self._recent))),
            )

    def _worked(self, now: float) -> float:
        """Seconds since the beginning without the pauses."""
        if self._began is None:
            return 0.0
        idle = self._idle + (0.0 if self._idle_since is None else now - self._idle_since)
        return now - self._began - idle

    def _rates(self, worked: float) -> tuple[float, float]:
        if not self._marks:
            return 0.0, 0.0
        since, rows, tokens = self._marks[0] if self._ended is None else (0.0, 0, 0)
        span = worked - since
        if span <= 0:
            return 0.0, 0.0
        return (self._done - rows) / span, (self._tokens - tokens) / span

    def _shown(self, ended: tuple[int, str, Outcome]) -> Recent:
        position, prompt, outcome = ended
        answer = outcome.error or outcome.text or ""
        return Recent(self._label(position), _words(prompt), _words(answer), outcome.finish_reason)


def _words(text: str) -> str:
    line = " ".join(text[: 4 * WORDS].split())
    return line if len(line) <= WORDS else f"{line[: WORDS - 1]}…"
