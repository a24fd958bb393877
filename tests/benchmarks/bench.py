"""What workloads have in common: their options, contenders that are up together, and rounds in turn."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .link import ContenderError, Entry, Link
from .table import AGAIN, FLOOR, Row
from .work import Answer, Ask, Prompt

OPTIONAL = ("vllm_mlx", "vllm_mlx_simple")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says.

    Attributes
    ----------
    folder, tiny : Path
        The subject, and a tiny one for what the engine alone costs.
    contenders : tuple of str, optional
        Only these of a workload's, and its optional ones among them.
    rounds, new : int, optional
        In place of each workload's own.
    quick : bool
        One round of the smallest of everything: whether it works, not how fast.
    """

    folder: Path
    tiny: Path
    model: str = "demo"
    contenders: tuple[str, ...] | None = None
    sizes: tuple[int, ...] | None = None
    rounds: int | None = None
    new: int | None = None
    quick: bool = False
    vllm_python: str | None = None
    say: Callable[[str], None] = print

    def rounds_or(self, usual: int) -> int:
        """Return how many rounds to run."""
        return self.rounds or (1 if self.quick else usual)

    def chosen(self, usual: Sequence[str], beside: Sequence[str] = ()) -> list[str]:
        """Return the names of the contenders to start, in the order of the workload.

        `beside` are those that are run only when they are asked for. The floor brings its copy, which shows how far
        it differs from itself; vllm-mlx takes an environment of its own.
        """
        names = [name for name in (*usual, *beside) if name in (self.contenders or usual)]
        if FLOOR in names and AGAIN not in names:
            names.insert(names.index(FLOOR) + 1, AGAIN)
        return [name for name in names if self.vllm_python or name not in OPTIONAL]

    def entry(self, name: str, driver: str | None = None, **options: Any) -> Entry:
        """Return a contender of a workload."""
        driver = driver or {AGAIN: FLOOR, "ours_stream": "ours"}.get(name, name)
        python = self.vllm_python if driver in OPTIONAL else None
        streams = True if name == "ours_stream" else None
        return Entry(name, driver, python or sys.executable, options, streams)


@dataclass(slots=True)
class Outcome:
    """What a workload found.

    Attributes
    ----------
    samples : list of dict
        Every single measurement.
    errors : list of str
        Contenders that failed; the others went on.
    """

    rows: list[Row] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """One piece of work, done by one contender."""

    contender: str
    round: int
    asks: list[Ask]
    answers: list[Answer]


class Field:
    """Contenders that are up. One that fails is out, and the others go on."""

    def __init__(self, options: Options, outcome: Outcome, gpu: bool) -> None:
        self.options = options
        self.gpu = gpu
        self.outcome = outcome
        self._links: dict[str, Link] = {}

    def enter(self, link: Link) -> None:
        """Let a contender in."""
        self._links[link.entry.name] = link
        self.outcome.facts[link.entry.name] = link.facts

    @property
    def names(self) -> list[str]:
        """Those that are up."""
        return list(self._links)

    def link(self, name: str) -> Link:
        """Return one that is up."""
        return self._links[name]

    @contextmanager
    def excused(self, name: str) -> Iterator[None]:
        """Take a contender out if it fails within."""
        try:
            yield
        except ContenderError as error:
            self.failed(name, error)

    def failed(self, name: str, error: Exception) -> None:
        """Take a contender out."""
        self.outcome.errors.append(str(error))
        self.options.say(f"  {name} is out: {str(error).strip().splitlines()[-1]}")
        if name in self._links:
            self._links.pop(name).close()

    def warm(self, asks: list[Ask], names: Sequence[str] | None = None) -> None:
        """Have everybody do something that isn't timed."""
        for name in names or self.names:
            if name in self._links:
                with self.excused(name):
                    self._links[name].run(asks)

    def rounds(
        self,
        count: int,
        work: Callable[[int], list[Ask]],
        names: Sequence[str] | None = None,
        fewer: dict[str, int] | None = None,
    ) -> Iterator[Run]:
        """Yield what came of `count` rounds in which all do the same work in turn: forwards, then backwards.

        `fewer` contenders take part in the first rounds only.
        """
        for number in range(count):
            asks = work(number)
            here = [name for name in names or self.names if number < (fewer or {}).get(name, count)]
            for name in here if number % 2 == 0 else reversed(here):
                if name not in self._links:
                    continue
                with self.excused(name):
                    yield Run(name, number, asks, self._links[name].run(asks))

    def close(self) -> None:
        """End all processes."""
        for link in self._links.values():
            link.close()


@contextmanager
def contest(
    options: Options, entries: Sequence[Entry], outcome: Outcome, folder: Path | None = None
) -> Iterator[tuple[Field, Callable[..., list[Prompt]]]]:
    """Start contenders, and a process that writes their prompts."""
    folder = folder or options.folder
    with ExitStack() as stack:
        writer = stack.enter_context(Link(Entry("writer", "writer"), folder))
        up = Field(options, outcome, gpu=writer.facts["gpu"])
        stack.callback(up.close)
        for entry in entries:
            options.say(f"  starting {entry.name}")
            try:
                up.enter(Link(entry, folder))
            except ContenderError as error:
                up.failed(entry.name, error)
        yield up, writer.prompts
