"""What every contender's driver does, and memory, which is measured alike for all."""

import resource
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ..work import Answer, Ask

MIB = 2**20


class Driver(ABC):
    """One way to get answers from a model.

    `options` are those of the table in `contenders/table.py`, each driver's own; every driver takes ``rows``, the
    most requests that will be at work at once.
    """

    @abstractmethod
    def load(self, folder: Path, options: dict[str, Any]) -> None:
        """Load a subject and be ready to work."""

    @abstractmethod
    def run(self, asks: list[Ask]) -> list[Answer]:
        """Do a piece of work, and return when its last answer has ended."""

    def memory(self) -> dict[str, float]:
        """Return MiB of this process: held now and at most, and what MLX had at most on its device."""
        import mlx.core as mx

        return {**process_memory("self"), "mlx_peak_mib": mx.get_peak_memory() / MIB}

    def close(self) -> None:  # noqa: B027
        """End what was started beside this process and its threads."""


def process_memory(pid: int | str) -> dict[str, float]:
    """Return MiB that a process holds and has held at most."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
        held, peak = (int(lines[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM"))
        return {"held_mib": held, "peak_mib": peak}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else 1024)
    return {"held_mib": peak, "peak_mib": peak}
