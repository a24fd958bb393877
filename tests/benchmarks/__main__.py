"""The benchmark suite: contenders in processes of their own, in turn, against their bars.

usage: python -m tests.benchmarks [WORKLOAD …] [options]; --help lists both

Every workload's result is written as soon as it is there: ``results.json`` with all samples, versions and the
machine, ``table.md``, and a picture each if Matplotlib is installed. Exit status 1 when a bar is missed or a
contender failed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import plots
from .bench import Options, Outcome
from .link import ROOT
from .table import Row, markdown
from .workloads import WORKLOADS

FOLDER_ONLY = {"mlx_lm_server", "ours_simple", "vllm_mlx_simple"}
"""Contenders that load a folder and no recipe."""


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    listing = "\n".join(f"  {name:10} {workload.about}" for name, workload in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Measure this package beside mlx-lm and vllm-mlx.",
        epilog=f"workloads:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help="see below; the usual ones if none is named"
    )
    parser.add_argument(
        "--contenders", type=several, metavar="A,B", help="only these; floor brings its copy along"
    )
    parser.add_argument(
        "--model", default="demo", help="demo, a folder, a Hub id, tiny, or random: with tiny, smollm2 or 8b"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--bits", type=int, choices=(2, 3, 4, 6, 8), help="quantise the model")
    parser.add_argument("--rounds", type=int, help="in place of each workload's own number")
    parser.add_argument("--sizes", type=lambda text: tuple(map(int, text.split(","))), metavar="1,8,32")
    parser.add_argument("--new", type=int, help="tokens of an answer, in `batch`")
    parser.add_argument("--vllm-python", metavar="PATH", help="Python of an environment with vllm-mlx")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where results go; else only the table is printed"
    )
    parser.add_argument("--quick", action="store_true", help="one round of little, to see that all works")
    read = parser.parse_args(words)
    if unknown := [name for name in read.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {unknown[0]!r}: there are {', '.join(WORKLOADS)}")
    return read


def subject(folder: Path, model: str, dtype: str | None, bits: int | None, weights: bool) -> Path:
    """Make the model ready, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.subjects",
        model,
        str(folder),
        dtype or "",
        str(bits or ""),
    ]
    subprocess.run([*command, "weights" if weights else ""], cwd=ROOT, check=True, stdout=sys.stderr)
    return folder


def machine() -> dict[str, Any]:
    """Return what figures depend on beside the contenders' own versions."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    return next(
        (line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.processor()
    )


def run(read: argparse.Namespace, work: Path) -> int:
    """Run the workloads and report."""
    names = read.workloads or [name for name, workload in WORKLOADS.items() if workload.usual]
    weights = bool(FOLDER_ONLY & set(read.contenders or FOLDER_ONLY))
    weights |= any(WORKLOADS[name].whole_folder for name in names)
    options = Options(
        folder=subject(work / "subject", read.model, read.dtype, read.bits, weights),
        tiny=subject(work / "tiny", "random:tiny", None, None, weights=False),
        model=read.model,
        contenders=read.contenders,
        sizes=read.sizes,
        rounds=read.rounds,
        new=read.new,
        quick=read.quick,
        vllm_python=read.vllm_python,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    written: dict[str, Any] = {
        "command": sys.argv[1:],
        "model": {"name": read.model, "dtype": read.dtype, "bits": read.bits},
        "machine": machine(),
        "workloads": {},
    }
    rows: list[Row] = []
    failed = False
    for name in names:
        options.say(f"{name}: {WORKLOADS[name].about}")
        began = time.monotonic()
        try:
            outcome = WORKLOADS[name].measure(options)
        except Exception as error:
            outcome = Outcome(errors=[traceback.format_exc()])
            options.say(f"  failed: {type(error).__name__}: {error}")
        failed |= bool(outcome.errors)
        rows += outcome.rows
        written["workloads"][name] = {
            "seconds": round(time.monotonic() - began, 1),
            "contenders": outcome.facts,
            "errors": outcome.errors,
            "rows": [row.plain() for row in outcome.rows],
            "samples": outcome.samples,
        }
        print(markdown(outcome.rows), flush=True)
        if read.out is not None:
            write(read.out, written, rows)
    return int(failed or any(row.verdict.startswith("missed") for row in rows))


def write(folder: Path, written: dict[str, Any], rows: list[Row]) -> None:
    """Write what there is so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
    (folder / "table.md").write_text(markdown(rows) + "\n", encoding="utf-8")
    plots.draw(rows, folder)


def main() -> int:
    """Run the suite."""
    read = arguments(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="mlx-nb-benchmarks-") as work:
        return run(read, Path(work))


if __name__ == "__main__":
    sys.exit(main())
