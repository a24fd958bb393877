"""The workloads by name. Each is a module with ``measure(options) -> Outcome``; what it knows of bars is in it."""

from collections.abc import Callable
from dataclasses import dataclass

from ..bench import Options, Outcome
from . import batch


@dataclass(frozen=True, slots=True)
class Workload:
    """What can be run."""

    about: str
    measure: Callable[[Options], Outcome]


WORKLOADS = {
    "batch": Workload("throughput of 1 to 32 requests at once", batch.measure),
}
