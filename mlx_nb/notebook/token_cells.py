"""Where an answer with log-probabilities is drawn: a token view in a notebook, text and a table in a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from IPython.core.displaypub import CapturingDisplayPublisher

from .formats import Said, small
from .kernel import in_kernel
from .views import Later, TerminalView, View, place

if TYPE_CHECKING:
    from ..widgets.tokens import GrowingTokens

__all__ = ["token_view_for"]


def token_view_for(shell: Any, title: str, k: int, label: str) -> View:
    """The view that suits where the shell runs; `k` alternatives are shown of each token."""
    return TokenCellView(shell, title, k, label) if in_kernel(shell) else TokenTerminalView("text")


class TokenCellView:
    """A widget a turn, which moves by itself. Under ``%%capture`` each is shown once, when it is complete."""

    def __init__(self, shell: Any, title: str, k: int, label: str) -> None:
        self._captured = isinstance(shell.display_pub, CapturingDisplayPublisher)
        self._title, self._k, self._label = title, k, label
        self._widget: GrowingTokens | None = None
        self._note: Any = None
        self._closing = small(label)
        self._settled: list[GrowingTokens] = []

    def open(self) -> None:
        """Show that the answer will come here."""
        if self._captured:
            return
        self._widget = self._make()
        place(self._widget)
        if self._label and self._note is None:
            self._note = place(small(self._label), keep=True)

    def _make(self) -> GrowingTokens:
        from ..widgets.tokens import GrowingTokens  # a notebook without log-probabilities needs no anywidget

        return GrowingTokens(self._title, self._k)

    def progress(self, text: str) -> None:
        """In the answer's place."""
        if self._widget is not None:
            self._widget.say(text)

    def show(self, said: Said, later: Later | None = None) -> None:  # noqa: ARG002 - the widget has its own pace
        """Note what there is; the widget draws it when it is time."""
        if self._widget is not None:
            self._widget.take(said)

    def turn(self, said: Said) -> None:
        """Another widget."""
        self._settle(said)
        self.open()

    def close(self, said: Said, note: str) -> None:
        """Draw the end, and a small grey line under it."""
        self._settle(said)
        self._closing = small(note)
        if self._note is None:
            place(self._closing)
        else:
            self._note.update(self._closing, raw=True)

    def redraw(self) -> None:
        """Bring what a saved notebook shows up to date once more."""
        for widget in self._settled:
            widget.keep()
        if self._note is not None:
            self._note.update(self._closing, raw=True)

    def _settle(self, said: Said) -> None:
        widget = self._widget or self._make()
        widget.end(said)
        if self._widget is None:
            place(widget)
        self._settled.append(widget)


class TokenTerminalView(TerminalView):
    """The text as it comes, and the uncertain tokens when it is complete."""

    def _end(self, said: Said) -> None:
        super()._end(said)
        from ..widgets.token_items import Tokens
        from ..widgets.token_page import uncertain_table

        tokens = Tokens()
        tokens.take(said.logprobs or ())
        table = uncertain_table(tokens.items)
        if table:
            sys.stdout.write(f"\n{table}\n\n")
