"""The checkpoint file: what it keeps, what becomes of damage, and who may use it at once."""

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_nb import CheckpointError
from mlx_nb.frames.outcome import Outcome
from mlx_nb.frames.store import Store
from mlx_nb.outputs import TokenLogprob

DONE = Outcome(
    "stop",
    "an answer, \N{GRINNING FACE} \ud83d \x00",
    prompt_tokens=5,
    completion_tokens=3,
    cached_tokens=0,
    reasoning="because",
    tool_calls=[{"name": "f", "arguments": {"x": [1, None]}}],
    logprobs=[TokenLogprob(7, -0.25, {7: -0.25, 8: float("-inf")}), TokenLogprob(9, -1.5)],
    queue_s=0.001,
    ttft_s=0.2,
    total_s=0.5,
)
FAILED = Outcome("error", error="RuntimeError: it failed", text="half")
KEY, OTHER = b"k" * 16, b"o" * 16


def run_python(code: str, *args: str) -> subprocess.Popen[str]:
    """Start a process that runs some code; a context manager."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args], stdout=subprocess.PIPE, text=True
    )


def fill(path: Path, rows: int = 3000) -> None:
    """Make a checkpoint of some size."""
    with Store.open(path) as store:
        for row in range(rows):
            store.put(row.to_bytes(16), Outcome("stop", f"answer {row} " * 5))


# -- what it keeps ----------------------------------------------------------------------------------------------


def test_what_was_put_is_there_at_once_and_after_reopening(tmp_path: Path) -> None:
    with Store.open(tmp_path / "rows.db") as store:
        store.put(KEY, DONE)
        store.put(OTHER, FAILED)
        assert (store.get(KEY), store.get(OTHER)) == (DONE, FAILED)
        store.flush()
        assert (store.get(KEY), store.get(OTHER)) == (DONE, FAILED)

    with Store.open(str(tmp_path / "rows.db")) as store:
        assert store.get_many([KEY, OTHER, b"none"]) == {KEY: DONE, OTHER: FAILED}
        assert store.counts() == (1, 1)


def test_a_later_outcome_takes_an_earlier_ones_place(tmp_path: Path) -> None:
    with Store.open(tmp_path / "rows.db") as store:
        store.put(KEY, FAILED)
        store.flush()
        store.put(KEY, DONE)
        assert store.get(KEY) == DONE
        assert store.counts() == (1, 0)


@pytest.mark.parametrize("reason", ["abort", "skipped"])
def test_only_answers_and_failures_are_kept(tmp_path: Path, reason: str) -> None:
    with Store.open(tmp_path / "rows.db") as store:
        store.put(KEY, Outcome(reason))
        assert store.get(KEY) is None
        assert store.counts() == (0, 0)


def test_many_keys_are_looked_up_at_once(tmp_path: Path) -> None:
    fill(tmp_path / "rows.db")
    with Store.open(tmp_path / "rows.db") as store:
        found = store.get_many(row.to_bytes(16) for row in range(5000))

    assert len(found) == 3000
    assert found[(7).to_bytes(16)].text == "answer 7 " * 5


def test_the_file_holds_no_prompts_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "rows.db"
    with Store.open(path) as store:
        store.put(KEY, DONE)

    connection = sqlite3.connect(path)
    columns = connection.execute("SELECT name FROM pragma_table_info('outcomes')").fetchall()
    tables = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE type = 'table'").fetchone()
    connection.close()
    assert (tables, columns) == ((1,), [("key",), ("done",), ("outcome",)])


def test_an_outcome_that_cant_be_read_is_as_none(tmp_path: Path) -> None:
    fill(tmp_path / "rows.db", rows=1)
    with sqlite3.connect(tmp_path / "rows.db") as connection:
        connection.execute("UPDATE outcomes SET outcome = '{\"no\": 1}'")
    connection.close()

    with Store.open(tmp_path / "rows.db") as store:
        assert store.get((0).to_bytes(16)) is None


# -- durable ----------------------------------------------------------------------------------------------------


def test_what_was_put_half_a_second_ago_survives_a_kill(tmp_path: Path) -> None:
    with run_python(
        """
        import sys, time
        from mlx_nb.frames.store import Store
        from mlx_nb.frames.outcome import Outcome
        store = Store.open(sys.argv[1])
        for row in range(500):
            store.put(row.to_bytes(16), Outcome("stop", "x"))
        print("put", flush=True)
        time.sleep(60)
        """,
        str(tmp_path / "rows.db"),
    ) as process:
        assert process.stdout.readline() == "put\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGKILL)

    with Store.open(tmp_path / "rows.db") as store:
        assert store.counts() == (500, 0)


# -- damage -----------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def scribble(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"\xff" * 3 * 4096)


def not_sqlite(path: Path) -> None:
    path.write_text("name,answer\n" * 1000)


def another_database(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE outcomes (key, value)")
    connection.commit()
    connection.close()


def another_table(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE outcomes ADD COLUMN more TEXT")
    connection.commit()
    connection.close()


DAMAGE = [truncate, scribble, not_sqlite, another_database, another_table]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_set_aside_and_said(tmp_path: Path, caplog, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "rows.db"
    fill(path)
    damage(path)
    before = path.read_bytes()

    with caplog.at_level(logging.WARNING), Store.open(path) as store:
        assert store.counts() == (0, 0)
        store.put(KEY, DONE)

    (aside,) = [other for other in tmp_path.iterdir() if ".damaged-" in other.name]
    assert aside.read_bytes() == before
    (record,) = caplog.records
    assert aside.name in record.message
    assert str(path) in record.message
    assert "\n" not in record.message
    with Store.open(path) as store:
        assert store.get(KEY) == DONE


def test_two_damaged_files_have_two_names(tmp_path: Path) -> None:
    for _ in range(2):
        not_sqlite(tmp_path / "rows.db")
        Store.open(tmp_path / "rows.db").close()

    assert len([other for other in tmp_path.iterdir() if ".damaged-" in other.name]) == 2


def test_an_empty_file_is_a_new_checkpoint(tmp_path: Path, caplog) -> None:
    (tmp_path / "rows.db").touch()
    with Store.open(tmp_path / "rows.db") as store:
        store.put(KEY, DONE)

    assert not caplog.records


def test_a_newer_file_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    fill(path, rows=1)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    before = path.read_bytes()

    with pytest.raises(
        CheckpointError, match=r"newer mlx_nb.*update mlx_nb, or choose another file"
    ) as caught:
        Store.open(path)

    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert [other.name for other in tmp_path.iterdir()] == ["rows.db"]


def test_a_path_that_cant_be_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "rows.db"):
        with pytest.raises(CheckpointError, match=r"can't be used.*choose another file") as caught:
            Store.open(path)
        assert "\n" not in str(caught.value)


# -- several at once --------------------------------------------------------------------------------------------


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    theirs = run_python(
        """
        import sys
        from mlx_nb.frames.store import Store
        from mlx_nb.frames.outcome import Outcome
        with Store.open(sys.argv[1]) as store:
            for row in range(2000, 4000):
                store.put(row.to_bytes(16), Outcome("stop", "theirs"))
                if row % 200 == 0:
                    store.flush()
        """,
        str(path),
    )
    with theirs, Store.open(path) as store:
        for row in range(2000):
            store.put(row.to_bytes(16), Outcome("stop", "ours"))
            if row % 200 == 0:
                store.flush()
        assert theirs.wait(30) == 0
        assert store.counts() == (4000, 0)
        assert store.get((2500).to_bytes(16)).text == "theirs"


def test_a_file_that_somebody_keeps_locked_is_waited_for_without_loss(tmp_path: Path, caplog) -> None:
    path = tmp_path / "rows.db"
    with Store.open(path) as store:
        connection = sqlite3.connect(path)
        connection.execute("BEGIN IMMEDIATE")
        store.put(KEY, DONE)
        time.sleep(0.5)
        assert store.get(KEY) == DONE
        connection.rollback()
        connection.close()
        store.flush()
        assert store.counts() == (1, 0)
    assert not caplog.records
