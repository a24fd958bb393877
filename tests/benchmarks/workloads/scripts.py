"""Workloads that are scripts of their own: each runs in a process and prints JSON, which figures are taken from."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..bench import Options, Outcome, contest
from ..link import ROOT
from ..table import Bar, single

LONGEST_S = 900.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A number in what a script prints.

    Attributes
    ----------
    path : str
        Keys with dots between.
    """

    path: str
    case: str
    name: str
    at_least: float | None = None
    at_most: float | None = None

    def read(self, printed: dict[str, Any]) -> float:
        """Return it."""
        found: Any = printed
        for key in self.path.split("."):
            found = found[key]
        return float(found)

    def bar(self) -> Bar | None:
        """Return what it must reach, if anything."""
        if self.at_least is None and self.at_most is None:
            return None
        return Bar("ours", None, self.at_least, self.at_most)


@dataclass(frozen=True, slots=True)
class Script:
    """A script, its arguments, and what is taken from its JSON."""

    module: str
    arguments: Callable[[Options], list[Any]]
    figures: tuple[Figure, ...]
    on: tuple[str, ...] = ("CPU", "GPU")


def overhead(rows: int, kind: str = "engine") -> Figure:
    """Return what the engine adds to a step of a tiny model's batch."""
    bound = 120 + 12 * rows if kind == "engine" else None
    return Figure(f"rows.{rows}.us_added.{kind}", f"batch {rows}", f"µs a step, {kind}", at_most=bound)


OVERHEAD = Script(
    "overhead",
    lambda options: [options.rounds_or(12), 50 if options.quick else 200],
    (*map(overhead, (1, 8, 32)), *(overhead(rows, "engine_streamed") for rows in (1, 8, 32))),
)
SAMPLING = Script(
    "sampling",
    lambda options: [options.folder, options.rounds_or(3), 32, options.new or 16],
    tuple(
        Figure(f"kinds.{kind}.ratio", f"batch 32, {words}", "of greedy", bound)
        for kind, words, bound in (
            ("top_k", "top-k to 64 and a penalty", 0.85),
            ("top_p", "top-p and a penalty", 0.65),
            ("top_p_only", "top-p", 0.65),
        )
    ),
)
SPINNING = Script(
    "spinning",
    lambda options: [options.rounds_or(6), 0.5],
    (
        Figure("kept", "tiny model, batch 1", "speed beside a busy cell, of idle", 0.35),
        Figure("cell_loses", "tiny model, batch 1", "share the cell loses", at_most=0.03),
    ),
    ("CPU",),
)
SPINNING_ON_GPU = Script(
    "spinning",
    lambda options: [options.rounds_or(4), 2.0, 32, options.folder],
    (Figure("kept", "batch 32", "speed beside a busy cell, of idle", 0.6),),
    ("GPU",),
)
STARTUP = Script(
    "startup",
    lambda options: [options.rounds_or(3), options.folder],
    (
        Figure("seconds.import.least_s", "import mlx_nb", "s", at_most=0.1),
        Figure("seconds.load_ext.least_s", "%load_ext mlx_nb", "s", at_most=0.2),
        Figure("seconds.model_loaded.median_s", "model loaded", "s"),
        Figure("seconds.first_token.median_s", "first token after that", "s"),
        Figure("seconds.second_first_token.median_s", "the next first token", "s"),
    ),
)
FRAMES = (
    Script(
        "frames_overhead",
        lambda options: [2_000 if options.quick else 20_000, options.rounds_or(3)],
        (
            Figure("us_beyond_the_engine", "a row", "µs", at_most=60),
            Figure("us_beyond_the_engine_with_checkpoint", "a row, stored", "µs", at_most=120),
        ),
    ),
    Script(
        "frames_shared_prefix",
        lambda options: [options.folder, 1],
        (
            Figure(
                "shared_prefix.times_as_fast", "64 rows, a 460-token instruction", "of batch_generate", 4.5
            ),
            Figure("duplicates.times_as_fast", "each row twice", "of all different", 1.8),
        ),
    ),
)
SIMPLE = Script(
    "simple_engine",
    lambda options: [options.folder, options.rounds_or(5)],
    (
        Figure("stream.ratio", "decoding", "of stream_generate", 0.97),
        Figure("system_prompt.ratio", "system prompt of 1,000", "hit over cold", 8.0),
        Figure("prompt_lookup.ratio", "copying", "with lookup over without", 1.5),
    ),
)
MONITOR = Script(
    "monitor_cost",
    lambda options: [options.rounds_or(10), 200 if options.quick else 1000],
    (Figure("cost", "watched", "share of decoding", at_most=0.01),),
)


def measure(options: Options, scripts: tuple[Script, ...]) -> Outcome:
    """Run some scripts, one after another."""
    outcome = Outcome()
    with contest(options, [], outcome, options.tiny) as (field, _):
        here = "GPU" if field.gpu else "CPU"
    for script in scripts:
        if here not in script.on:
            continue
        command = [
            sys.executable,
            "-m",
            f"tests.benchmarks.{script.module}",
            *map(str, script.arguments(options)),
        ]
        options.say("  " + " ".join(command[2:]))
        done = None
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S, check=False
            )
            printed = json.loads(done.stdout[done.stdout.index("{") :])
            outcome.rows += [
                single(script.module, figure.case, "ours", figure.name, figure.read(printed), figure.bar())
                for figure in script.figures
            ]
        except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
            outcome.errors.append(f"{script.module}: {type(error).__name__}: {said(error, done)}")
            options.say(outcome.errors[-1])
            continue
        outcome.facts[script.module] = {"status": done.returncode}
        outcome.samples.append({"script": script.module, **printed})
    return outcome


def said(error: Exception, done: "subprocess.CompletedProcess[str] | None") -> str:
    """Return the last words of a script that printed no JSON."""
    words = error.stderr if isinstance(error, subprocess.TimeoutExpired) else done and done.stderr
    return str(words)[-1500:]


def workload(*scripts: Script) -> Callable[[Options], Outcome]:
    """Return a workload's `measure`."""
    return partial(measure, scripts=scripts)
