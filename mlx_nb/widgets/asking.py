"""One question in an engine's hands, and what there is of its answer.

Owns the thread that asks and reads: the engine may still be loading, and neither a widget's pace nor a cell waits for
it. It holds the engine only as long as that lasts, and knows nothing of widgets.
"""

from __future__ import annotations

import base64
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.core import EngineCore
from ..errors import EngineNotStarted, MlxNbError
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from ..session.conversation import Conversation
from ..session.media import NO_MEDIA, Media
from .protocol import ChatFigures, ChatImage, ChatTurn, TurnEnding
from .readings import one_line

__all__ = ["NO_FIGURES", "Asking", "Question"]

SMALL = 320
"""Most pixels of a side of what the panel shows of an image."""

LOADING_S = 0.2
"""Seconds after which a wait for the model looks whether it is still wanted."""

NO_FIGURES: ChatFigures = {"rate": None, "first_s": None, "prompt": None, "cached": None, "output": None}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Question:
    """What somebody asks: the text, what it is about, and what the panel shows of that."""

    text: str
    media: Media = NO_MEDIA
    shown: Sequence[ChatImage] = ()

    @classmethod
    def about(cls, text: str, media: Media, names: Sequence[str] = ()) -> Question:
        """A question with small pictures of its media; of a clip it is the first."""
        pictures = [*media.pictures, *(clip.frames[0] for clip in media.clips)]
        named = itertools.zip_longest(pictures, names[: len(pictures)], fillvalue="image")
        return cls(text, media, [_small(picture, name) for picture, name in named])


class Asking:
    """A question on its way. `turn` may be read from any thread, at any time.

    Parameters
    ----------
    key : str
        The turn's name on the wire.
    before : Conversation
        What was said before the question; only read.
    engine : callable
        Finds the engine, on this question's thread; what it raises becomes the turn's problem.
    on_end : callable
        Called once, on that thread, when the answer is whole, stopped or has failed; it sets `live` to False.
    """

    def __init__(
        self,
        key: str,
        question: Question,
        before: Conversation,
        engine: Callable[[], EngineCore],
        params: SamplingParams,
        on_end: Callable[[Asking], None],
    ) -> None:
        self.key, self.question = key, question
        self.live = True
        self._before, self._engine, self._params, self._on_end = before, engine, params, on_end
        self._lock = threading.Lock()
        self._answer: list[str] = []
        self._reasoning: list[str] = []
        self._ending: TurnEnding = "waiting"
        self._problem: str | None = None
        self._thought: tuple[float, float] | None = None
        self._output: RequestOutput | None = None
        self._left_out = 0
        self._stopped = False
        self._abort: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="mlx_nb chat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Have it end with the text that there is."""
        with self._lock:
            self._stopped, abort = True, self._abort
        if abort is not None:
            abort()

    def join(self, timeout: float) -> None:
        """Wait for the end, if it is another thread that waits."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def answered(self) -> bool:
        """Whether it ended with an answer, a part of one included."""
        return self._ending in ("done", "length") or (self._ending == "stopped" and bool(self._answer))

    @property
    def left_out(self) -> int:
        """Oldest turns that the prompt had no room for."""
        return self._left_out

    def turn(self) -> ChatTurn:
        """All there is."""
        with self._lock:
            thought = self._thought
            return {
                "key": self.key,
                "question": self.question.text,
                "images": list(self.question.shown),
                "answer": "".join(self._answer),
                "reasoning": "".join(self._reasoning),
                "status": {
                    "ending": self._ending,
                    "problem": self._problem,
                    "thought_s": None if thought is None else round(thought[1] - thought[0], 1),
                    "left_out": self._left_out,
                },
            }

    def figures(self) -> ChatFigures:
        """How fast it goes, rounded to what a reader can see."""
        output = self._output
        if output is None:
            return NO_FIGURES
        first, total = output.timings.get("ttft_s"), output.timings.get("total_s", 0.0)
        made = output.completion_tokens
        timed = first is not None and made > 1 and total > first
        return {
            "rate": round((made - 1) / (total - first), 1) if timed and first is not None else None,
            "first_s": None if first is None else round(first, 2),
            "prompt": output.prompt_tokens,
            "cached": output.cached_tokens,
            "output": made,
        }

    def _run(self) -> None:
        try:
            self._ask()
        except EngineNotStarted:  # the panel says which one, and how to start it
            self._fail("no engine was running: start one, then try again")
        except Exception as error:
            if not isinstance(error, MlxNbError | ValueError):
                _log.warning("a question of the chat panel failed", exc_info=True)
            self._fail(one_line(error))
        finally:
            self._abort = None
            self._on_end(self)

    def _fail(self, problem: str) -> None:
        with self._lock:
            self._ending, self._problem = "failed", problem

    def _ask(self) -> None:
        core = self._engine()
        if not self._loaded(core):
            self._ending = "stopped"
            return
        fitted = self._before.fit(
            core,
            self.question.text,
            max_tokens=self._params.max_tokens,
            thinking=self._params.thinking,
            media=self.question.media,
        )
        self._left_out = fitted.left_out
        request_id = core.submit(
            fitted.tokens,
            self._params,
            prefix_boundary=fitted.prefix_boundary,
            preview=self.question.text,
            **fitted.media.options(),
        )
        with self._lock:
            self._abort, stopped = lambda: core.abort(request_id), self._stopped
        if stopped:
            core.abort(request_id)
        for output in core.stream_sync(request_id):
            self._take(output)

    def _loaded(self, core: EngineCore) -> bool:
        """Wait for the model; False if nobody waits for the answer any more."""
        while not self._stopped:
            try:
                core.wait_ready(LOADING_S)
            except TimeoutError:
                continue
            return True
        return False

    def _take(self, output: RequestOutput) -> None:
        now = time.monotonic()
        with self._lock:
            self._output = output
            if output.new_reasoning:
                self._reasoning.append(output.new_reasoning)
                self._thought = (now if self._thought is None else self._thought[0], now)
            if output.new_text:
                self._answer.append(output.new_text)
            if output.finished:
                self._ending = _ENDINGS.get(output.finish_reason or "", "done")
            elif output.new_reasoning or output.new_text:
                self._ending = "answering"


def _small(picture: Any, name: str) -> ChatImage:
    data = base64.b64encode(picture.thumbnail_png(SMALL)).decode()
    return {"name": name, "src": f"data:image/png;base64,{data}"}


_ENDINGS: dict[str, TurnEnding] = {"length": "length", "abort": "stopped"}
