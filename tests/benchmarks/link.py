"""The parent's end of a contender's process: start it, ask it, and never wait for ever.

The process takes its calls as lines of JSON (`contenders/process.py`). It works only between a call and its reply, so
asking one contender at a time is all it takes to have one at work at a time.
"""

import json
import queue
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from .work import Answer, Ask, Prompt

ROOT = Path(__file__).parents[2]
LOAD_S, RUN_S, CLOSE_S = 600.0, 600.0, 30.0


class ContenderError(Exception):
    """A contender failed, hung or ended; the message has what it said."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender of a workload.

    Attributes
    ----------
    name : str
        In tables; two copies of one driver have different names.
    driver : str
        One of `contenders/process.py`.
    options : dict
        For the driver.
    streams : bool, optional
        Overrides what the workload asks for: whether tokens are streamed.
    """

    name: str
    driver: str
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict)
    streams: bool | None = None


class Link:
    """A contender that is up."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        self.entry = entry
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [entry.python, "-m", "tests.benchmarks.contenders.process", entry.driver]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.facts: dict[str, Any] = self.call("load", LOAD_S, folder=str(folder), options=entry.options)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Link":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def call(self, name: str, timeout: float = RUN_S, **arguments: Any) -> Any:
        """Return the result of a call."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            self._process.kill()
            raise ContenderError(f"{self.entry.name} took more than {timeout:.0f} s for {name!r}") from None
        except OSError:
            line = ""
        if not line:
            raise ContenderError(f"{self.entry.name} has ended: {self._last_words()}")
        reply = json.loads(line)
        if "error" in reply:
            raise ContenderError(f"{self.entry.name}: {reply['error']}")
        return reply["result"]

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-2000:].strip()

    def prompts(self, kind: str, count: int, tokens: int, seed: int, shared: int = 0) -> list[Prompt]:
        """Return prompts, as `prompts.Writer` writes them."""
        written = self.call("prompts", kind=kind, count=count, tokens=tokens, seed=seed, shared=shared)
        return [Prompt(**prompt) for prompt in written]

    def run(self, asks: list[Ask]) -> list[Answer]:
        """Have a piece of work done."""
        plain = [ask.plain() for ask in asks]
        if self.entry.streams is not None:
            plain = [{**ask, "streams": self.entry.streams} for ask in plain]
        return [Answer(**answer) for answer in self.call("run", asks=plain)]

    def memory(self) -> dict[str, float]:
        """Return MiB, as `contenders.driver.Driver.memory` does."""
        held: dict[str, float] = self.call("memory")
        return held

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(CLOSE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._said.close()
