"""The benchmark suite works: not how fast anything is, which is measured by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_suite_drives_contenders_in_turn_and_writes_every_sample(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks", "batch", "--model", "tiny", "--sizes", "2"]
    command += ["--rounds", "2", "--new", "4", "--contenders", "floor,ours", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert (tmp_path / "results.json").exists(), done.stderr
    written = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    batch = written["workloads"]["batch"]
    assert batch["errors"] == []
    assert set(batch["contenders"]) == {"floor", "floor_again", "ours"}
    turns = [(sample["contender"], sample["round"]) for sample in batch["samples"]]
    names = ["floor", "floor_again", "ours"]
    assert turns == [(name, 0) for name in names] + [(name, 1) for name in reversed(names)]
    (row,) = [row for row in batch["rows"] if row["contender"] == "ours"]
    assert (row["against"], row["rounds"], row["bar"]) == ("floor", 2, "≥ 0.97")
    assert row["low"] <= row["ratio"] <= row["high"]
    assert batch["contenders"]["ours"]["versions"]["mlx-nb"]
    assert {"cores", "processor", "when"} <= set(written["machine"])
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == done.stdout
    assert not [row for row in batch["rows"] if "unlike" in row["figure"]], "all answers are the floor's"
    missed = any(row["verdict"].startswith("missed") for row in batch["rows"])
    assert done.returncode == missed
