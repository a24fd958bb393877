"""The workloads by name. Each has ``measure(options) -> Outcome``; what it knows of bars is in its module."""

from collections.abc import Callable
from dataclasses import dataclass

from ..bench import Options, Outcome
from . import aborts, arrivals, batch, company, first_token, many, memory, mixed, scripts, shared


@dataclass(frozen=True, slots=True)
class Workload:
    """What can be run.

    Attributes
    ----------
    whole_folder : bool
        It takes a folder with weights in it: a recipe won't do.
    usual : bool
        It is run when no workload is named.
    """

    about: str
    measure: Callable[[Options], Outcome]
    whole_folder: bool = False
    usual: bool = True


WORKLOADS = {
    "batch": Workload("throughput of 1 to 32 requests at once", batch.measure),
    "arrivals": Workload(
        "chats that arrive every 100 ms, and in bursts: first tokens, throughput", arrivals.measure
    ),
    "shared": Workload("prompts that share 1,000 tokens, together and one after another", shared.measure),
    "mixed": Workload("gaps between streamed tokens while a prompt of 4,000 is prefilled", mixed.measure),
    "company": Workload("a lone answer that gets company and loses it: tokens, speed", company.measure),
    "aborts": Workload("what a storm of requests that leave takes from those that stay", aborts.measure),
    "many": Workload("10,000 short requests: rate, and memory that stays flat", many.measure),
    "memory": Workload("peak memory, with the prefix cache and without", memory.measure),
    "first_token": Workload("a new process: import, load, first token", first_token.measure),
    "overhead": Workload("microseconds a step beyond the bare loop's", scripts.workload(scripts.OVERHEAD)),
    "sampling": Workload(
        "what sampling costs at batch 32", scripts.workload(scripts.SAMPLING), whole_folder=True
    ),
    "spinning": Workload(
        "decoding while the main thread spins in Python",
        scripts.workload(scripts.SPINNING, scripts.SPINNING_ON_GPU),
    ),
    "startup": Workload(
        "import, load_ext, load, first token of ours", scripts.workload(scripts.STARTUP), True
    ),
    "frames": Workload("a DataFrame's column", scripts.workload(*scripts.FRAMES), True),
    "monitor": Workload("what a watched monitor costs", scripts.workload(scripts.MONITOR)),
    "simple": Workload(
        "SimpleEngine's short cuts; only when it is named",
        scripts.workload(scripts.SIMPLE),
        True,
        usual=False,
    ),
}
