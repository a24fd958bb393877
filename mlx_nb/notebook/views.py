"""Where a streamed answer is drawn: a display of its own in a notebook, plain text in a terminal."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.display import display

from ..engine.core import EngineCore
from ..outputs import RequestOutput
from .formats import Bundle, Said, bundle, plain_text, small
from .kernel import in_kernel

__all__ = ["PromptProgress", "StatusLine", "View", "count", "finish_line", "place", "view_for"]

REDRAW_S = 0.1
"""Each update of a display sends the whole text again: ten times a second is smooth, and not a flood."""

LONG_PROMPT = 512
"""Tokens from which on it is worth saying how far reading is."""

PROGRESS_S = 0.3
WAITING = "…"
Later = Callable[[float, Callable[[], None]], Any]


class View(Protocol):
    """What an answer is streamed into."""

    def open(self) -> None:
        """Claim a place in the cell."""

    def progress(self, text: str) -> None:
        """Say what goes on before the answer begins; from any thread."""

    def show(self, said: Said, later: Later | None = None) -> None:
        """The answer so far; `later(seconds, function)` lets a draw that comes too soon be made up for."""

    def turn(self, said: Said) -> None:
        """What was said is complete, and the model goes on with another turn under it."""

    def close(self, said: Said, note: str) -> None:
        """The whole answer, and a line about it."""

    def redraw(self) -> None:
        """Draw all of it once more, on behalf of the cell that runs now."""


def view_for(shell: Any, style: str, *, hidden: bool = False, label: str = "", share: int = 1) -> View:
    """The view that suits where the shell runs.

    Parameters
    ----------
    style : str
        One of `formats.FORMATS`.
    hidden : bool
        Draw nothing.
    label : str
        A line that stands under the answer until it is complete.
    share : int
        Views that are drawn at the same time.
    """
    if hidden:
        return _NoView()
    return CellView(shell, style, label, share) if in_kernel(shell) else TerminalView(style)


class CellView:
    """One display a turn, which is updated wherever it is by then. Under ``%%capture`` each is drawn once."""

    def __init__(self, shell: Any, style: str, label: str, share: int) -> None:
        self._captured = isinstance(shell.display_pub, CapturingDisplayPublisher)
        self._style, self._label, self._redraw_s = style, label, REDRAW_S * share
        self._handle: Any = None
        self._note: Any = None
        self._said = Said()
        self._drawn_at = 0.0
        self._pending: Any = None
        self._settled: list[tuple[Any, Bundle]] = []

    def open(self) -> None:
        """Show that the answer will come here."""
        if not self._captured:
            self._handle = place(bundle(Said(WAITING)), keep=True)
            if self._label and self._note is None:
                self._note = place(small(self._label), keep=True)

    def progress(self, text: str) -> None:
        """In the answer's place."""
        if self._handle is not None:
            self._handle.update(small(text), raw=True)

    def show(self, said: Said, later: Later | None = None) -> None:
        """Draw, if the last time is long enough ago."""
        self._said = said
        wait = self._drawn_at + self._redraw_s - time.monotonic()
        if wait <= 0:
            self._draw()
        elif later is not None and self._pending is None:
            self._pending = later(wait, self._draw)

    def _draw(self) -> None:
        self._forget_pending()
        if self._handle is not None and (self._said.text or self._said.reasoning):
            self._drawn_at = time.monotonic()
            self._handle.update(bundle(self._said, self._style), raw=True)

    def _forget_pending(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None

    def turn(self, said: Said) -> None:
        """Another display."""
        self._settle(said)
        self.open()

    def close(self, said: Said, note: str) -> None:
        """Draw the end, and a small grey line under it."""
        self._settle(said)
        if self._note is None:
            place(small(note))
        else:
            self._replace(self._note, small(note))

    def redraw(self) -> None:
        """Update what was drawn in displays of its own to what it is."""
        for handle, what in self._settled:
            handle.update(what, raw=True)

    def _replace(self, handle: Any, what: Bundle) -> None:
        handle.update(what, raw=True)
        self._settled.append((handle, what))

    def _settle(self, said: Said) -> None:
        self._forget_pending()
        whole = bundle(said, self._style)
        if self._handle is None:
            place(whole)
        else:
            self._replace(self._handle, whole)


class TerminalView:
    """Deltas to stdout; JSON as a whole, since it is laid out anew."""

    def __init__(self, style: str) -> None:
        self._whole = style == "json"
        self._begin()

    def _begin(self) -> None:
        self._shown = {"reasoning": 0, "text": 0}
        self._part = ""

    def open(self) -> None:
        """Nothing to claim."""

    def progress(self, text: str) -> None:
        """Nothing: it couldn't be taken back."""

    def show(self, said: Said, later: Later | None = None) -> None:  # noqa: ARG002 - nothing is ever put off
        """Write what is new."""
        if not self._whole:
            self._write("reasoning", said.reasoning)
            self._write("text", said.text)
            sys.stdout.flush()

    def _write(self, part: str, text: str) -> None:
        new, self._shown[part] = text[self._shown[part] :], len(text)
        if self._part not in ("", part):
            new = new.lstrip()
        if not new:
            return
        if self._part != part:
            head = "Reasoning:\n" if part == "reasoning" else ""
            new = ("\n\n" if self._part else "") + head + new
            self._part = part
        sys.stdout.write(new)

    def turn(self, said: Said) -> None:
        """Begin another paragraph."""
        self._end(said)
        sys.stdout.write("\n")
        self._begin()

    def close(self, said: Said, note: str) -> None:
        """Write the rest, and the line."""
        self._end(said)
        sys.stdout.write(f"({note})\n")

    def redraw(self) -> None:
        """Nothing: what is printed stays."""

    def _end(self, said: Said) -> None:
        if self._whole:
            sys.stdout.write(bundle(said, "json")["text/plain"])
        else:
            self.show(said)
            calls = plain_text(Said(calls=said.calls), "")
            sys.stdout.write(("\n" if calls and self._part else "") + calls)
        sys.stdout.write("\n")


class _NoView:
    """Draws nothing."""

    def open(self) -> None:
        """Nothing."""

    def progress(self, text: str) -> None:
        """Nothing."""

    def show(self, said: Said, later: Later | None = None) -> None:
        """Nothing."""

    def turn(self, said: Said) -> None:
        """Nothing."""

    def close(self, said: Said, note: str) -> None:
        """Nothing."""

    def redraw(self) -> None:
        """Nothing."""


class PromptProgress:
    """Says in a view how far a request's prompt is read, until `end`. Short prompts are read without a word.

    Parameters
    ----------
    tokens : int, optional
        Length of the prompt; None for a server's, which is waited for.
    """

    def __init__(self, core: EngineCore, request_id: str, tokens: int | None, view: View) -> None:
        self._core, self._id, self._view = core, request_id, view
        self._ended = threading.Event()
        self._lock = threading.Lock()
        if tokens is None or tokens >= LONG_PROMPT:
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(self._watch,), name="mlx_nb progress", daemon=True
            ).start()

    def _watch(self) -> None:
        while not self._ended.wait(PROGRESS_S):
            stats = self._core.get_stats()
            rows = {row["request_id"]: row for row in stats["requests"]}
            text = _reading(rows.get(self._id), stats.get("remote"))
            with self._lock:
                if text is None or self._ended.is_set():
                    return
                self._view.progress(text)

    def end(self) -> None:
        """After this the view is left alone."""
        with self._lock:
            self._ended.set()


def _reading(row: dict[str, Any] | None, server: dict[str, Any] | None) -> str | None:
    """What a request does before its answer begins; None once it has."""
    match row:
        case {"phase": "waiting"}:
            return "waiting for other requests"
        case {"phase": "prefill"} if server is not None:
            problem = server["problem"]
            return "waiting for the server" if problem is None else f"asking again: {problem}"
        case {"phase": "prefill", "prefilled_tokens": done, "prompt_tokens": total}:
            return f"reading the prompt, {done:,} of {total:,} tokens"
    return None


class StatusLine:
    """A line of plain text that is replaced as things go on."""

    def __init__(self, shell: Any) -> None:
        self._replaces = in_kernel(shell) and not isinstance(shell.display_pub, CapturingDisplayPublisher)
        self._handle: Any = None
        self._text = ""

    def show(self, text: str) -> None:
        """Replace the line; where that can't be done, add one."""
        if text == self._text:
            return
        self._text = text
        if not self._replaces:
            sys.stdout.write(text + "\n")
        elif self._handle is None:
            self._handle = place({"text/plain": text}, keep=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)


def finish_line(output: RequestOutput, calls: int = 0) -> str:
    """How it went: tokens, speed, time to the first token, what the cache held, calls of tools, why it ended."""
    made, timings = output.completion_tokens, output.timings
    first, total = timings.get("ttft_s"), timings.get("total_s", 0.0)
    parts = [count(made, "token")]
    if first is not None and made > 1 and total > first:
        parts.append(f"{(made - 1) / (total - first):,.1f} tokens/s")
    if first is not None:
        parts.append(f"first token after {first:.2f} s")
    if output.cached_tokens:
        parts.append(f"{output.cached_tokens:,} of {output.prompt_tokens:,} prompt tokens cached")
    if calls:
        parts.append(f"after {count(calls, 'call')}")
    parts.append(_ENDINGS.get(output.finish_reason or "", output.finish_reason or "unfinished"))
    return " · ".join(parts)


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 token", "2,000 tokens"."""
    return f"1 {noun}" if number == 1 else f"{number:,} {noun}s"


_ENDINGS = {"length": "length (max tokens)", "abort": "interrupted", "tool_calls": "calls a tool"}


def place(what: Any, *, keep: bool = False) -> Any:
    """Display an object, or a bundle of MIME types, in the cell; with `keep` the handle to update it by."""
    raw = isinstance(what, dict)
    return display(what, raw=raw, display_id=keep or None)  # type: ignore[no-untyped-call, unused-ignore]
