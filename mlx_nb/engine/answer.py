"""One request's answer in its life: waiting, running, read by many, ended once.

The engine thread pushes tokens; any number of consumers, on any thread or loop, read what is new to them. An
answer is append-only, so every consumer's deltas join to the same final text. Whoever ends it first wins.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..backends.base import Ended, Text, Token
from ..codec import Codec
from ..outputs import RequestOutput
from ..request import Request, RequestStatus
from .received import Received
from .transcript import Transcript

__all__ = ["Answer", "Cursor"]

log = logging.getLogger("mlx_nb")


_ENDS = {"stop": RequestStatus.FINISHED_STOPPED, "length": RequestStatus.FINISHED_LENGTH_CAPPED}


@dataclass(slots=True)
class Cursor:
    """How far a consumer has read."""

    tokens: int = 0
    chars: int = 0
    reasoning: int = 0
    finished: bool = False


class Answer:
    """Keeps an answer's state, times and listeners; what it says is in its `Transcript`, or `Received` of a server.

    Parameters
    ----------
    limit : int
        Tokens after which it ends with "length".
    stream_interval : int
        Tokens between two deltas.
    """

    def __init__(self, request: Request, codec: Codec, *, limit: int, stream_interval: int = 1) -> None:
        self.request = request
        self.status = RequestStatus.WAITING
        self.prefilled = 0
        self.cached_tokens = 0
        self.drafts = self.accepted = 0
        self.started: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None
        self.error: BaseException | None = None
        self._transcript: Transcript | Received
        if request.asked is None:
            self._transcript = Transcript(request, codec, limit)
        else:
            self._transcript = Received(request, limit)
        self.prompt_tokens = len(request.prompt_token_ids)
        self._interval = stream_interval
        self._shown = Cursor()
        self._lock = threading.Lock()
        self._watchers: dict[object, Callable[[], None]] = {}
        self._final_watchers: list[Callable[[], None]] = []

    # -- the engine thread ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that the request was admitted."""
        with self._lock:
            if not self.status.is_finished():
                self.status = RequestStatus.RUNNING
                self.started = self.started or time.monotonic()

    def preempt(self) -> None:
        """Note that the request waits again, to go on later."""
        with self._lock:
            if not self.status.is_finished():
                self.status = RequestStatus.PREEMPTED
                self.prefilled = 0

    def progress(self, done: int, cached: int) -> None:
        """Note that `done` tokens are in the KV cache, `cached` of them reused."""
        self.prefilled = min(done, len(self.request.prompt_token_ids))
        if self.first_token is None:
            self.cached_tokens = cached

    def drafted(self, proposed: int, accepted: int) -> None:
        """Count what speculation guessed in a step."""
        self.drafts += proposed
        self.accepted += accepted

    @property
    def length(self) -> int:
        """Tokens of the answer so far."""
        return self._transcript.count

    @property
    def made(self) -> list[int]:
        """The tokens of the answer so far."""
        return list(self._transcript.tokens)

    def push(self, token: Token) -> RequestStatus | None:
        """Take the next token; a finished status if the answer ends here, for `finish`, or has ended before."""
        with self._lock:
            if self.status.is_finished():
                return self.status
            self.prefilled = len(self.request.prompt_token_ids)
            if self.first_token is None:
                self.first_token = time.monotonic()
            assert isinstance(self._transcript, Transcript)
            end = self._transcript.add(token.token_id, token.logprob)
            news = len(self._transcript.tokens) - self._shown.tokens >= self._interval
        if end is not None:
            return _ENDS[end]
        if news:
            self._show()
        return None

    def write(self, event: Text | Ended) -> RequestStatus | None:
        """`push` for what comes from a server."""
        with self._lock:
            if self.status.is_finished():
                return self.status
            assert isinstance(self._transcript, Received)
            if isinstance(event, Ended):
                self._transcript.close(event.tool_calls, event.completion_tokens)
                self.prompt_tokens = self.prefilled = event.prompt_tokens
                self.cached_tokens = event.cached_tokens
                return _ENDS[event.reason]
            if self.first_token is None:
                self.first_token = time.monotonic()
            if self._transcript.write(event.answer, event.reasoning, event.tokens):
                return RequestStatus.FINISHED_STOPPED
        self._show()
        return None

    # -- any thread -------------------------------------------------------------------------------------

    def finish(self, status: RequestStatus, error: BaseException | None = None) -> bool:
        """End the answer and wake everyone; False if it had ended before."""
        with self._lock:
            if self.status.is_finished():
                return False
            if status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
                with contextlib.suppress(Exception):  # what failed may be the detokenizer itself
                    self._transcript.cut_off()
            self.status, self.error, self.ended = status, error, time.monotonic()
            final, self._final_watchers = self._final_watchers, []
        self._show()
        _call(final)
        return True

    def _show(self) -> None:
        with self._lock:
            self._shown = self._now()
            watchers = list(self._watchers.values())
        _call(watchers)

    def watch(self, key: object, wake: Callable[[], None]) -> None:
        """Have `wake` called (on the engine's or the aborting thread; it must not block) when there is news."""
        with self._lock:
            self._watchers[key] = wake

    def unwatch(self, key: object) -> None:
        """Undo `watch`."""
        with self._lock:
            self._watchers.pop(key, None)

    def on_finish(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once, when the answer ends, or now if it has."""
        with self._lock:
            if not self.status.is_finished():
                self._final_watchers.append(wake)
                return
        wake()

    def take(self, cursor: Cursor) -> RequestOutput | None:
        """What is new to this consumer, moving its cursor on; None if nothing is."""
        with self._lock:
            shown = self._shown
            if shown == cursor:
                return None
            output = self._output(cursor, shown)
        cursor.tokens, cursor.chars = shown.tokens, shown.chars
        cursor.reasoning, cursor.finished = shown.reasoning, shown.finished
        return output

    def final(self) -> RequestOutput:
        """The whole answer as one output."""
        with self._lock:
            return self._output(Cursor(), self._now())

    def _now(self) -> Cursor:
        said = self._transcript
        return Cursor(said.count, len(said.text), len(said.reasoning), self.status.is_finished())

    def _output(self, since: Cursor, upto: Cursor) -> RequestOutput:
        said = self._transcript
        text, tokens = said.text[: upto.chars], said.tokens[: upto.tokens]
        reasoning = said.reasoning[: upto.reasoning]
        reason = self.status.get_finish_reason() if upto.finished else None
        return RequestOutput(
            request_id=self.request.request_id,
            new_token_ids=tokens[since.tokens :],
            new_text=text[since.chars :],
            output_token_ids=tokens,
            output_text=text,
            finished=upto.finished,
            finish_reason="tool_calls" if reason == "stop" and said.tool_calls else reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=upto.tokens,
            cached_tokens=self.cached_tokens,
            mtp_drafts=self.drafts,
            mtp_accepted=self.accepted,
            logprobs=None if said.logprobs is None else said.logprobs[: upto.tokens],
            error=self.error if upto.finished else None,
            new_reasoning=reasoning[since.reasoning :],
            reasoning=reasoning,
            tool_calls=list(said.tool_calls),
            timings=self.timings(),
        )

    @property
    def limit(self) -> int:
        """Tokens after which it ends with "length"."""
        return self._transcript.limit

    def timings(self) -> dict[str, float]:
        """Seconds: ``queue_s``, ``ttft_s`` and ``total_s``, as far as they are known."""
        begin, now = self.request.arrival, self.ended or time.monotonic()
        known = {"queue_s": self.started, "ttft_s": self.first_token, "total_s": now}
        return {name: at - begin for name, at in known.items() if at is not None}

    def describe(self, now: float) -> dict[str, object]:
        """The request's row in ``get_stats()["requests"]``."""
        with self._lock:
            total, made = self.prompt_tokens, self._transcript.count
            first, running = self.first_token, self.status is RequestStatus.RUNNING
            decoding = running and first is not None
            phase = "decode" if decoding else "prefill" if running else "waiting"
            elapsed = now - first if first is not None else 0.0
            return {
                "request_id": self.request.request_id,
                "status": self.status.value,
                "phase": phase,
                "prompt_tokens": total,
                "prefilled_tokens": self.prefilled,
                "completion_tokens": made,
                "max_tokens": self.limit,
                "progress": made / self.limit
                if decoding and self.limit
                else self.prefilled / total
                if total
                else 0.0,
                "elapsed_s": now - self.request.arrival,
                "ttft_s": None if first is None else first - self.request.arrival,
                "tokens_per_second": made / elapsed if elapsed > 0 else 0.0,
                "cache_hit_type": "prefix" if self.cached_tokens else "miss",
                "cached_tokens": self.cached_tokens,
                "prompt_preview": self.request.preview,
            }


def _call(wakes: list[Callable[[], None]]) -> None:
    """Tell listeners; one that fails, or exits, is its own problem, not the engine's."""
    interrupted = False
    for wake in wakes:
        try:
            wake()
        except KeyboardInterrupt:
            interrupted = True
        except BaseException:
            log.exception("mlx_nb: a listener of an answer failed")
    if interrupted and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
