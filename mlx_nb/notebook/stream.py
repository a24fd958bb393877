"""A prompt on its way through an engine into a cell.

Blocking and awaited, it does the same: wait for the model, submit, draw what comes, carry out the tools that the
model calls, and hand over a result. An interrupt ends the request, keeps what there is, and ends the cell as
interrupted; a fault or a timeout keeps what there is as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from IPython.core.error import UsageError

from ..engine.core import EngineCore
from ..engine.intake import Prompt
from ..engine.interrupts import ends_the_loop
from ..errors import MlxNbError
from ..outputs import RequestOutput
from ..prompts.chat import Message, messages_for
from ..request import Chat
from ..sampling import SamplingParams
from ..session.conversation import Conversation
from ..session.media import Media, length, with_media
from ..session.session import prefix_boundary_for, prompt_for, question_for, to_generation
from ..session.tools import Called, Tools
from .formats import Bundle, Said
from .images import NOTHING, Attached
from .kernel import current_cell, in_kernel, interrupts_raise
from .result import Result, Samples
from .token_cells import token_view_for
from .views import PromptProgress, View, count, finish_line, place, view_for

__all__ = ["Ask", "Count", "Stream", "interrupted", "one_line_errors"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of which engine, and what becomes of the answer.

    Attributes
    ----------
    raw : bool
        Leave the chat template out.
    out : str, optional
        The variable for the result, which is the magic's value otherwise.
    style : str
        One of `formats.FORMATS`.
    by_token : bool
        Show the tokens' probabilities instead.
    samples : int or None
        That many answers, as a list.
    tools : Tools, optional
        What the model may call.
    max_calls : int
        Calls that are carried out; 0 leaves them all to the caller.
    timeout : float, optional
        Seconds that it all may take once the model is loaded.
    conversation : Conversation, optional
        What the prompt goes on with; it gets the new turn.
    attached : Attached
        Images and videos that the prompt is about.
    """

    core: EngineCore
    prompt: str
    params: SamplingParams
    system: str | None = None
    raw: bool = False
    out: str | None = None
    style: str = "markdown"
    by_token: bool = False
    quiet: bool = False
    samples: int | None = None
    tools: Tools | None = None
    max_calls: int = 0
    timeout: float | None = None
    conversation: Conversation | None = None
    attached: Attached = NOTHING

    def tokens(self, messages: Sequence[Message] | None = None) -> tuple[Prompt, int, Media]:
        """The prompt for the engine, where later ones may begin to differ, and what goes with it.

        The model must be there.

        Parameters
        ----------
        messages : sequence of messages, optional
            The conversation as it has become, in place of the prompt.
        """
        if self.conversation is not None:
            fitted = self.conversation.fit(
                self.core,
                self.prompt,
                max_tokens=self.params.max_tokens,
                thinking=self.params.thinking,
                media=self.attached.media,
            )
            return fitted.tokens, fitted.prefix_boundary, fitted.media
        if messages is None:
            prompt, media = question_for(
                self.core, self.prompt, self.attached.media, system=self.system, raw=self.raw
            )
        else:
            prompt, media = question_for(self.core, messages)
        options: dict[str, Any] = {
            "system": self.system,
            "thinking": self.params.thinking,
            "tools": self.tools.schemas if self.tools else None,
        }
        tokens = prompt_for(self.core, prompt, raw=self.raw, **options)
        return tokens, 0 if media else prefix_boundary_for(self.core, prompt, tokens, **options), media


class Count:
    """Counts a prompt's tokens instead of asking it."""

    def __init__(self, shell: Any, ask: Ask) -> None:
        self._shell, self._ask = shell, ask

    def run(self) -> int | None:
        """Block until the model is there."""
        with interrupts_raise(), one_line_errors():
            self._ask.core.wait_ready()
            return self._count()

    async def run_awaited(self) -> int | None:
        """Await the model."""
        with one_line_errors():
            await self._ask.core.ready()
            return self._count()

    def _count(self) -> int | None:
        tokens, _, media = self._ask.tokens()
        count = length(self._ask.core, tokens, media)
        if self._ask.out is None:
            return count
        self._shell.push({self._ask.out: count}, interactive=False)
        return None


class Stream:
    """Carries out one `Ask`, once.

    Parameters
    ----------
    background : bool
        The cell goes on meanwhile: draw only where displays can be updated later.
    """

    def __init__(self, shell: Any, ask: Ask, *, background: bool = False) -> None:
        self._shell, self._ask, self._core = shell, ask, ask.core
        self._cell = current_cell(shell)
        self._background = background
        self._submitted = False
        self.aborted = False
        samples = ask.samples or 1
        hidden = ask.quiet or (background and not in_kernel(shell))
        self._answers = [
            _Answer(
                ask,
                _sample(ask.params, i),
                f"{i + 1} of {samples}" if samples > 1 else "",
                functools.partial(self._view, hidden, samples),
                None if hidden or i or not in_kernel(shell) else ask.attached.thumbnails(),
            )
            for i in range(samples)
        ]

    def _view(self, hidden: bool, samples: int, label: str) -> View:
        ask, shell = self._ask, self._shell
        label = label or ("in the background" if self._background else "")
        if ask.by_token and not hidden:
            return token_view_for(shell, ask.core.model_name, ask.params.logprobs or 0, label)
        return view_for(shell, ask.style, hidden=hidden, label=label, share=samples)

    def run(self) -> Any:
        """Block until the answer is complete."""
        self.work()
        return self._finish()

    def work(self) -> None:
        """`run` without handing anything over; for a thread as well."""
        with interrupts_raise(), self._guarded():
            self._core.wait_ready()
            self.submit()
            for answer in self._answers if self._submitted else ():
                self._read(answer)

    def _read(self, answer: _Answer) -> None:
        while not answer.complete:
            for output in self._core.stream_sync(answer.id):
                answer.take(output)
            for call in answer.calls:
                if not self.aborted:
                    answer.called(self._tools.run(call))
            answer.go_on(last=self.aborted)

    async def run_awaited(self) -> Any:
        """Await the answer; the loop goes on meanwhile."""
        with self._guarded():
            await self._core.ready()
            self.submit()
            if len(self._answers) == 1:
                await self._follow(self._answers[0])
            else:
                await asyncio.gather(*map(self._follow, self._answers))
        return self._finish()

    async def _follow(self, answer: _Answer) -> None:
        later = asyncio.get_running_loop().call_later
        while not answer.complete:
            async for output in self._core.stream_outputs(answer.id):
                answer.take(output, later)
            for call in answer.calls:
                with interrupts_raise():  # a plain function blocks the loop
                    called = self._tools.start(call)
                answer.called(called if isinstance(called, Called) else await called)
            answer.go_on()

    @property
    def _tools(self) -> Tools:
        assert self._ask.tools is not None
        return self._ask.tools

    def open(self) -> None:
        """Claim places in the running cell, ahead of what needs the model."""
        for answer in self._answers:
            answer.open()

    def submit(self) -> None:
        """Queue the requests, if that has not been done. The model must be there."""
        if not (self._submitted or self.aborted):
            self._submitted = True
            for answer in self._answers:
                answer.submit()

    def abort(self) -> None:
        """End it, from any thread; what there is stays."""
        self.aborted = True
        for answer in self._answers:
            self._core.abort(answer.id)

    def redraw(self) -> None:
        """Draw the answers once more, on behalf of the cell that runs now."""
        for answer in self._answers:
            answer.redraw()

    @property
    def outputs(self) -> list[RequestOutput]:
        """What there is of each answer."""
        return [answer.last for answer in self._answers]

    @property
    def result(self) -> Result | Samples:
        """What there is, as the notebook gives it."""
        results = [answer.result(self._cell) for answer in self._answers]
        return results[0] if self._ask.samples is None else Samples(results)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """However it ends: no request is left, and the cell shows how far each came."""
        try:
            with one_line_errors():
                yield
        except (KeyboardInterrupt, asyncio.CancelledError):
            self.abort()
            self._read_what_waits()
        except BaseException as error:
            self._close("error", f"failed: {error}" if self._background else "")
            started = self._submitted and any(output.completion_tokens for output in self.outputs)
            if started and not self._background:  # the variable there is the handle
                self._keep()
            raise
        finally:
            for answer in self._answers:
                answer.progress_ends()
                self._core.abort(answer.id)
        self._close("abort")

    def _read_what_waits(self) -> None:
        """Of several samples, a cell that blocks may not have come to the later ones yet."""
        for answer in self._answers if self._submitted else ():
            if not (answer.complete or answer.last.completion_tokens):
                with contextlib.suppress(MlxNbError, ValueError):
                    for output in self._core.stream_sync(answer.id):
                        answer.last = output

    def _close(self, reason: str, failure: str = "") -> None:
        for answer in self._answers:
            answer.close(reason, failure)

    def _keep(self) -> None:
        """The result as a variable, in a cell that has no value."""
        if self._ask.out is None:
            self._shell.displayhook.update_user_ns(self.result)
        else:
            self._shell.push({self._ask.out: self.result}, interactive=False)

    def _finish(self) -> Result | Samples | None:
        """Hand the result over; an interrupted one as well, before the cell ends."""
        ask, last = self._ask, self.outputs[0]
        if ask.conversation is not None and (last.output_text or last.finish_reason != "abort"):
            ask.conversation.add(ask.prompt, last.output_text, ask.attached.media)
        if not any(output.finish_reason == "abort" for output in self.outputs):
            if ask.out is None:
                return self.result
            self._keep()
            return None
        self._keep()
        made = sum(output.completion_tokens for output in self.outputs)
        raise interrupted(f"generation interrupted; {ask.out or '_'} holds the {made} tokens so far")


class _Answer:
    """One of the answers that are asked for: its turns, in one view."""

    def __init__(
        self,
        ask: Ask,
        params: SamplingParams,
        label: str,
        make_view: Callable[[str], Any],
        above: Bundle | None,
    ) -> None:
        self._ask, self._params, self._label, self._above = ask, params, label, above
        self._view = make_view(label)
        self._opened = self._closed = False
        self._messages: list[Message] | None = None
        self._called: list[Called] = []
        self._turn: tuple[Called, ...] = ()
        self._deadline: float | None = None
        self._progress: PromptProgress | None = None
        self.complete = False
        self.id = self._new_id()
        self.last = RequestOutput(self.id)

    @staticmethod
    def _new_id() -> str:
        return f"cell-{uuid.uuid4().hex[:8]}"

    def open(self) -> None:
        if not self._opened:
            self._opened = True
            if self._above is not None:
                place(self._above)
            self._view.open()

    def submit(self) -> None:
        """Queue the next turn."""
        ask, core = self._ask, self._ask.core
        tokens, boundary, media = ask.tokens(self._messages)
        left = ask.timeout
        if left is not None:
            self._deadline = self._deadline or time.monotonic() + left
            left = left if self._messages is None else max(0.0, self._deadline - time.monotonic())
        core.submit(
            tokens,
            self._params,
            self.id,
            prefix_boundary=boundary,
            preview=ask.prompt,
            tools=ask.tools.schemas if ask.tools else None,
            timeout=left,
            **media.options(),
        )
        self.open()
        length = None if isinstance(tokens, Chat) else len(tokens)
        self._progress = PromptProgress(core, self.id, length, self._view)

    def take(self, output: RequestOutput, later: Callable[..., Any] | None = None) -> None:
        """Draw what has come."""
        self.progress_ends()
        self.last = output
        self._view.show(Said.of(output), later)

    def progress_ends(self) -> None:
        if self._progress is not None:
            self._progress.end()

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Calls of this turn that are to be carried out: all of them, or none if they are too many."""
        calls = self.last.tool_calls if self.last.finish_reason == "tool_calls" else []
        return calls if len(self._called) + len(calls) <= self._ask.max_calls else []

    def called(self, called: Called) -> None:
        """Draw a call's result."""
        self._turn += (called,)
        self._view.show(Said.of(self.last, self._turn))

    def go_on(self, *, last: bool = False) -> None:
        """Ask for the next turn, if the model waits for results of calls; else, or after the `last`, all is said."""
        if last or not self._turn:
            self.complete = True
            self.close()
            return
        if self._messages is None:
            self._messages = with_media(
                messages_for(self._ask.prompt, self._ask.system), self._ask.attached.media
            )
        number = len(self._called)
        self._messages += _as_messages(self.last, self._turn, number)
        self._called += self._turn
        said, self._turn = Said.of(self.last, self._turn), ()
        self._view.turn(said)
        self.id = self._new_id()
        self.last = RequestOutput(self.id)
        self.submit()

    def close(self, reason: str = "", failure: str = "") -> None:
        """Draw the end, once; `reason` and `failure` are those of an answer that has not ended by itself."""
        if self.complete:
            failure = ""
        else:
            self.last = replace(self.last, finished=True, finish_reason=reason)
        if self._opened and not self._closed:
            self._closed = True
            self._view.close(Said.of(self.last, self._turn), failure or self._note())

    def redraw(self) -> None:
        self._view.redraw()

    def _note(self) -> str:
        line = finish_line(self.last, len(self._called))
        if self.last.finish_reason == "tool_calls" and self._ask.max_calls:
            line += f" (--max-calls {self._ask.max_calls})"
        talk = self._ask.conversation
        if talk is not None and talk.left_out:
            line += f" · {count(talk.left_out, 'oldest turn')} left out: the context has no room for them"
        return f"{self._label} · {line}" if self._label else line

    def result(self, cell: object) -> Result:
        talk = self._ask.conversation
        return Result(
            replace(
                to_generation(self.last, self._params), turns_left_out=0 if talk is None else talk.left_out
            ),
            self._ask.style,
            [*self._called, *self._turn],
            cell=cell,
        )


def _sample(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of one of several samples: seeds count up."""
    return params if params.seed is None else params.but(seed=(params.seed + number) % 2**64)


def _as_messages(output: RequestOutput, turn: Sequence[Called], before: int) -> list[Message]:
    """A turn that called tools, and what they gave, as chat templates know it."""
    ids = [f"call{before + i:05d}" for i in range(len(turn))]  # nine letters and digits: Mistral insists
    asked: dict[str, Any] = {
        "role": "assistant",
        "content": output.output_text,
        "tool_calls": [
            {"id": key, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for key, call in zip(ids, turn, strict=True)
        ],
    }
    if output.reasoning:
        asked["reasoning_content"] = output.reasoning
    told: list[Mapping[str, Any]] = [
        {"role": "tool", "tool_call_id": key, "name": call.name, "content": call.content}
        for key, call in zip(ids, turn, strict=True)
    ]
    return [asked, *told]


def interrupted(message: str) -> BaseException:
    """What ends a cell as interrupted, so that Run All stops, in one line instead of a traceback.

    In a task beside the cell's it ends that task as cancelled.
    """
    if ends_the_loop():
        return asyncio.CancelledError(message)
    error = KeyboardInterrupt(message)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
    return error


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors as IPython's UsageError: one line, no traceback (``%tb`` still has it)."""
    try:
        yield
    except UsageError:
        raise
    except (MlxNbError, ValueError, TimeoutError) as error:
        raise UsageError(_line(error)) from error
    except Exception as error:  # a fault of the model or of a processor
        raise UsageError(f"the engine reports {type(error).__name__}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
