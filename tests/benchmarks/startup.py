"""What it takes to begin: importing, loading the extension, loading a model, its first token, and the demo's cells.

usage: python -m tests.benchmarks.startup [ROUNDS] [MODEL]

Each time in a fresh process, in turn. Prints JSON: seconds, least and median. What ``import mlx_nb`` and
``%load_ext mlx_nb`` take is counted without the interpreter and without IPython. Exit status 1 when a bound is
missed.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from .report import report

BOUNDS = {"import": 0.1, "load_ext": 0.2}
_SHELL = """\
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
"""
STEPS = {
    "import": ("", "import mlx_nb"),
    "load_ext": (_SHELL, 'shell.run_line_magic("load_ext", "mlx_nb")'),
}
_TIMED = """\
import json, time
{before}
times = {{}}
began = time.perf_counter()
{timed}
times["{name}"] = time.perf_counter() - began
print(json.dumps(times))
"""
_MODEL = """\
import json, time
began = time.perf_counter()
from mlx_nb import AsyncEngineCore, SamplingParams
core = AsyncEngineCore.from_pretrained({model!r}).engine
times = {{"model_named": time.perf_counter() - began}}
stages, seen = {{}}, []
def note(progress):
    now = time.perf_counter()
    seen.append((progress.stage, now))
core._on_progress = note
core.launch()
core.wait_ready()
times["model_loaded"] = time.perf_counter() - began
for (stage, at), (_, until) in zip(seen, [*seen[1:], ("", time.perf_counter())]):
    stages[stage] = stages.get(stage, 0.0) + until - at
times |= {{f"stage_{{stage}}": seconds for stage, seconds in stages.items()}}
params = SamplingParams(max_tokens=1, temperature=0)
for name in ("first_token", "second_first_token"):
    asked = time.perf_counter()
    core.generate_sync("Once upon a time", params)
    times[name] = time.perf_counter() - asked
core.close()
print(json.dumps(times))
"""


def fresh(code: str) -> dict[str, float]:
    """Return what a process prints that runs nothing but this."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"IPYTHONDIR": folder}
        ran = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
        )
    times: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return times


def measure(rounds: int, model: str) -> dict[str, Any]:
    """Run all of it in turn."""
    codes = [
        _TIMED.format(name=name, before=before, timed=timed) for name, (before, timed) in STEPS.items()
    ] + [_MODEL.format(model=model)]
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for code in codes:
            for name, seconds in fresh(code).items():
                if turn:  # the first compiles what Python caches, and reads files from the disk
                    times.setdefault(name, []).append(seconds)
    return {
        name: {"least_s": round(min(each), 4), "median_s": round(statistics.median(each), 4)}
        for name, each in times.items()
    }


def main() -> int:
    """Measure and report."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    model = sys.argv[2] if len(sys.argv) > 2 else "demo"
    figures = measure(rounds, model)
    missed = [name for name, bound in BOUNDS.items() if figures[name]["least_s"] >= bound]
    report(rounds=rounds, model=model, bounds=BOUNDS, missed=missed, seconds=figures)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
