"""One request's answer in its life: waiting, running, read by many, ended once.

The engine thread pushes tokens; any number of consumers, on any thread or loop, read what is new to them, and make
its text as they do. An answer is append-only, so every consumer's deltas join to the same final text. Whoever ends it
first wins.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..backends.base import Ended, Text, Token
from ..codec import Codec
from ..outputs import RequestOutput
from ..request import Request, RequestStatus
from .received import Received
from .transcript import Transcript

__all__ = ["Answer", "Cursor", "Wake", "call_all"]

log = logging.getLogger("mlx_nb")


Wake = Callable[[], None]
_ENDS = {"stop": RequestStatus.FINISHED_STOPPED, "length": RequestStatus.FINISHED_LENGTH_CAPPED}


@dataclass(slots=True)
class Cursor:
    """How far a consumer has read."""

    mark: int = 0
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
        self._shown = 0
        self._over = False
        self._lock = threading.Lock()
        self._reading = threading.RLock()
        """Held, before the other one, by who makes text; the engine's thread waits for it only if text may end it."""
        self._watchers: dict[object, Wake] = {}
        self._final_watchers: list[Wake] = []

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

    def push(self, token: Token, wakes: list[Wake]) -> RequestStatus | None:
        """Take the next token; a finished status if the answer ends here, for `finish`, or has ended before.

        Whom there is news for is added to `wakes`.
        """
        said = self._transcript
        assert isinstance(said, Transcript)
        if not said.eager:
            return self._push(said, token, wakes)
        with self._reading:
            return self._push(said, token, wakes)

    def _push(self, said: Transcript, token: Token, wakes: list[Wake]) -> RequestStatus | None:
        with self._lock:
            if self._over:
                return self.status
            if self.first_token is None:
                self.first_token = time.monotonic()
                self.prefilled = len(self.request.prompt_token_ids)
            if (end := said.add(token.token_id, token.logprob)) is not None:
                return _ENDS[end]
            mark = len(said.tokens)
            if mark - self._shown >= self._interval:
                self._shown = mark
                wakes.extend(self._watchers.values())
            return None

    def write(self, event: Text | Ended, wakes: list[Wake]) -> RequestStatus | None:
        """`push` for what comes from a server."""
        said = self._transcript
        assert isinstance(said, Received)
        with self._reading, self._lock:
            if self._over:
                return self.status
            if isinstance(event, Ended):
                said.close(event.tool_calls, event.completion_tokens)
                self.prompt_tokens = self.prefilled = event.prompt_tokens
                self.cached_tokens = event.cached_tokens
                return _ENDS[event.reason]
            if self.first_token is None:
                self.first_token = time.monotonic()
            if said.write(event.answer, event.reasoning, event.tokens):
                return RequestStatus.FINISHED_STOPPED
            if said.mark - self._shown >= self._interval:
                self._shown = said.mark
                wakes.extend(self._watchers.values())
            return None

    # -- any thread -------------------------------------------------------------------------------------

    def finish(self, status: RequestStatus, error: BaseException | None = None) -> bool:
        """End the answer and wake everyone; False if it had ended before."""
        with self._lock:
            if self._over:
                return False
            self.status, self.error, self.ended = status, error, time.monotonic()
            self._shown = self._transcript.mark
            self._over = True
            final, self._final_watchers = self._final_watchers, []
            watchers = list(self._watchers.values())
        call_all(watchers)
        call_all(final)
        return True

    def watch(self, key: object, wake: Wake) -> None:
        """Have `wake` called (on the engine's or the aborting thread; it must not block) when there is news."""
        with self._lock:
            self._watchers[key] = wake

    def unwatch(self, key: object) -> None:
        """Undo `watch`."""
        with self._lock:
            self._watchers.pop(key, None)

    def on_finish(self, wake: Wake) -> None:
        """Have `wake` called once, when the answer ends, or now if it has."""
        with self._lock:
            if not self.status.is_finished():
                self._final_watchers.append(wake)
                return
        wake()

    def take(self, cursor: Cursor) -> RequestOutput | None:
        """What is new to this consumer, moving its cursor on; None if nothing is."""
        if self._shown == cursor.mark and self._over == cursor.finished:
            return None
        with self._reading:
            over = self._over  # before the mark, which then is the last one
            return self._output(cursor, self._shown, over)

    def final(self) -> RequestOutput:
        """The whole answer as one output."""
        with self._reading:
            with self._lock:
                mark, over = self._transcript.mark, self._over
            return self._output(Cursor(), mark, over)

    def _output(self, cursor: Cursor, mark: int, over: bool) -> RequestOutput:
        """What there is up to a mark and was not read before; moves the cursor on."""
        said = self._transcript
        try:
            said.read(mark, ended=over)
        except Exception as error:  # the tokenizer's, say: this request's fault alone
            over = self._spoilt(error)
        tokens, text, reasoning = said.tokens[:mark], said.text, said.reasoning
        reason = self.status.get_finish_reason() if over else None
        # By position, which takes a third of the time; there is one a token.
        output = RequestOutput(
            self.request.request_id,
            tokens[cursor.tokens :],
            text[cursor.chars :],
            tokens,
            text,
            over,
            "tool_calls" if reason == "stop" and said.tool_calls else reason,
            self.prompt_tokens,
            said.count_at(mark),
            self.cached_tokens,
            self.drafts,
            self.accepted,
            None if (logprobs := said.logprobs) is None else logprobs[:mark],
            self.error if over else None,
            reasoning[cursor.reasoning :],
            reasoning,
            list(said.tool_calls),
            self.timings(),
        )
        cursor.mark, cursor.tokens, cursor.finished = mark, len(tokens), over
        cursor.chars, cursor.reasoning = len(text), len(reasoning)
        return output

    def _spoilt(self, error: Exception) -> bool:
        """End the answer for a fault in making its text, though it had come to its end; True."""
        if not self.finish(RequestStatus.FINISHED_ERROR, error):
            with self._lock:
                if self.error is None and self.status is not RequestStatus.FINISHED_ABORTED:
                    self.status, self.error = RequestStatus.FINISHED_ERROR, error
        return True

    @property
    def limit(self) -> int:
        """Tokens after which it ends with "length"."""
        return self._transcript.limit

    def timings(self) -> dict[str, float]:
        """Seconds: ``queue_s``, ``ttft_s`` and ``total_s``, as far as they are known."""
        begin, timings = self.request.arrival, {}
        if self.started is not None:
            timings["queue_s"] = self.started - begin
        if self.first_token is not None:
            timings["ttft_s"] = self.first_token - begin
        timings["total_s"] = (self.ended or time.monotonic()) - begin
        return timings

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


def call_all(wakes: Sequence[Wake]) -> None:
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
