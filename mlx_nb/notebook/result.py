"""An answer as a value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from ..outputs import GenerationOutput, TokenLogprob
from ..session.tools import Called
from .formats import Said, bundle
from .kernel import current_cell, in_kernel
from .views import place

if TYPE_CHECKING:
    from ..widgets.tokens import TokensView

__all__ = ["Result", "Samples"]


class Result(str):
    """An answer: its text, and how it came about.

    Displayed in the cell that streamed it, it stays silent, since the answer is there already; anywhere else it
    shows itself in the format that was asked for.

    Attributes
    ----------
    output : GenerationOutput
        Tokens, counts, finish reason and timings, of the last turn if tools were called.
    style : str
        The format that it is displayed in.
    calls : tuple of Called
        Calls of tools that were carried out, with their results.
    """

    __slots__ = ("_cell", "calls", "output", "style")

    output: GenerationOutput
    style: str
    calls: tuple[Called, ...]
    _cell: object

    def __new__(
        cls,
        output: GenerationOutput,
        style: str = "markdown",
        calls: Iterable[Called] = (),
        *,
        cell: object = None,
    ) -> Result:
        """Wrap an output; `cell` streamed it (the running one, if not given)."""
        self = super().__new__(cls, output.text)
        self.output = output
        self.style = style
        self.calls = tuple(calls)
        self._cell = current_cell(get_ipython()) if cell is None else cell
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.output, self.style, self.calls)

    def __getstate__(self) -> None:
        """All there is goes through ``__new__``."""

    @property
    def text(self) -> str:
        """The answer as a plain str."""
        return self.output.text

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered."""
        return self.output.reasoning

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls that were not carried out: ``{"name": …, "arguments": …}``."""
        return self.output.tool_calls

    @property
    def parsed(self) -> Any:
        """The value of a structured answer: of a schema the JSON, or an instance of the class; else the text.

        None for an answer that was cut off or had no structure to follow.
        """
        return self.output.parsed

    @property
    def tokens(self) -> list[int]:
        """Token ids of the answer."""
        return self.output.tokens

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities of each token, if they were asked for."""
        return self.output.logprobs

    def tokens_view(self) -> TokensView:
        """The answer token by token, shaded by probability; of the last turn if tools were called.

        Raises
        ------
        ValueError
            The answer was made without ``--logprobs``.
        """
        from ..widgets.tokens import TokensView

        return TokensView(self.output)

    @property
    def finish_reason(self) -> str | None:
        """One of "stop", "length", "tool_calls", "abort", "error"."""
        return self.output.finish_reason

    @property
    def timings(self) -> dict[str, float]:
        """Seconds: ``queue_s``, ``ttft_s`` and ``total_s``."""
        return self.output.timings

    def __repr__(self) -> str:
        head = self.text if len(self.text) <= 40 else self.text[:39] + "…"
        return f"<Result {head!r}, {self.output.completion_tokens} tokens, {self.finish_reason}>"

    def bundle(self) -> dict[str, str]:
        """How a notebook shows it, by MIME type."""
        return bundle(Said.of(self.output), self.style)

    def _ipython_display_(self) -> None:
        if not in_kernel(get_ipython()):
            raise NotImplementedError  # a terminal prints what _repr_pretty_ says
        if self._cell != current_cell(get_ipython()):
            place(self.bundle())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython gives it
        here = self._cell == current_cell(get_ipython())
        printer.text(repr(self) if here else self.bundle()["text/plain"])


class Samples(list[Result]):
    """Several answers to one prompt. Where a `Result` stays silent, they do."""

    def _ipython_display_(self) -> None:
        if not in_kernel(get_ipython()):
            raise NotImplementedError  # a terminal prints the list
        for result in self:
            result._ipython_display_()
