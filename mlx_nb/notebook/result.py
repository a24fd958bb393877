"""An answer as a value."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython

from ..outputs import GenerationOutput
from .kernel import current_cell, in_kernel
from .views import markdown, place

__all__ = ["Result"]


class Result(str):
    """An answer: its text, and how it came about.

    Displayed in the cell that streamed it, it stays silent, since the answer is there already; anywhere else it
    shows its text.

    Attributes
    ----------
    output : GenerationOutput
        Tokens, counts, finish reason and timings.
    """

    __slots__ = ("_cell", "output")

    output: GenerationOutput
    _cell: object

    def __new__(cls, output: GenerationOutput) -> Result:
        """Wrap an output."""
        self = super().__new__(cls, output.text)
        self.output = output
        self._cell = current_cell(get_ipython())
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.output,)

    def __getstate__(self) -> None:
        """All there is goes through ``__new__``."""

    @property
    def text(self) -> str:
        """The answer as a plain str."""
        return self.output.text

    @property
    def tokens(self) -> list[int]:
        """Token ids of the answer."""
        return self.output.tokens

    @property
    def finish_reason(self) -> str | None:
        """One of "stop", "length", "abort"."""
        return self.output.finish_reason

    @property
    def timings(self) -> dict[str, float]:
        """Seconds: ``queue_s``, ``ttft_s`` and ``total_s``."""
        return self.output.timings

    def __repr__(self) -> str:
        head = self.text if len(self.text) <= 40 else self.text[:39] + "…"
        return f"<Result {head!r}, {self.output.completion_tokens} tokens, {self.finish_reason}>"

    def _ipython_display_(self) -> None:
        if not in_kernel(get_ipython()):
            raise NotImplementedError  # a terminal prints what _repr_pretty_ says
        if self._cell != current_cell(get_ipython()):
            place(markdown(self.text))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython gives it
        printer.text(repr(self) if self._cell == current_cell(get_ipython()) else self.text)
