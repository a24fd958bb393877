"""The benchmark suite works: not how fast anything is, which is measured by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.table import Bar, compare
from benchmarks.work import Answer, gaps, percentile, same

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(200)  # five processes import MLX
def test_the_suite_drives_contenders_in_turn_and_writes_every_sample(tmp_path):
    command = [sys.executable, "-m", "tests.benchmarks", "batch", "--model", "tiny", "--sizes", "2"]
    command += ["--rounds", "2", "--new", "4", "--contenders", "floor,ours", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
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


def test_gaps_are_those_that_touch_the_time_in_question():
    answers = [Answer(times=[1.0, 2.0, 4.0, 4.5]), Answer(times=[3.0]), Answer()]
    assert gaps(answers) == [1.0, 2.0, 0.5]
    assert gaps(answers, since=2.5, until=4.0) == [2.0]
    assert gaps(answers, since=4.0, until=4.1) == [0.5]


@pytest.mark.parametrize(("share", "expected"), [(1, 1), (50, 2), (51, 3), (75, 3), (99, 4), (100, 4)])
def test_a_percentile_is_one_of_the_values(share, expected):
    assert percentile([4, 2, 3, 1], share) == expected


def test_a_bar_is_met_by_the_median_of_the_rounds_and_what_the_floor_differs_from_itself_is_said():
    series = {
        "floor": [10, 10, 10, 10, 10],
        "floor_again": [8, 9, 10, 11, 12],
        "ours": [9.6, 9.6, 9.0, 9.6, 20],
    }
    verdicts = {}
    for bound in (0.95, 0.97, 1.2):
        rows = compare("batch", "1", "tokens/s", series, [Bar("ours", at_least=bound)])
        (row,) = [row for row in rows if row.contender == "ours"]
        assert row.ratio == pytest.approx(0.96)
        verdicts[bound] = row.verdict
    assert verdicts == {0.95: "met", 0.97: "missed, within the noise", 1.2: "missed"}


def test_rounds_that_a_contender_was_not_in_do_not_count():
    series = {"floor": [10, 20, 40], "theirs": [5, 10]}
    (_, row) = compare("batch", "1", "tokens/s", series)
    assert (row.ratio, row.rounds) == (0.5, 2)


def test_answers_without_tokens_are_compared_by_text():
    reference = [Answer(ids=[1, 2], text=" a b"), Answer(ids=[3], text="c")]
    assert same([Answer(ids=[1, 2], text="?"), Answer(text="c ")], reference) == 2
    assert same([Answer(ids=[1], text=" a b"), Answer(text="d")], reference) == 0
