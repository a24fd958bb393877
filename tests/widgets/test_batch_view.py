"""A DataFrame job's view without a browser: what it reads, what its buttons do, its end, and what is saved of it."""

import gc
import json
import threading
import time
import typing
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_nb.frames.snapshot import Recent, Snapshot
from mlx_nb.widgets import BatchWidget
from mlx_nb.widgets import protocol as wire
from mlx_nb.widgets.batch import About, as_html, as_text, read

FIXTURE = Path(__file__).parents[2] / "js" / "test" / "fixtures" / "protocol.json"
SNAPSHOT = Snapshot(
    state="running",
    total=1200,
    done=842,
    failed=7,
    skipped=23,
    truncated=3,
    reused=300,
    running=8,
    rows_per_second=4.2123,
    tokens_per_second=486.29,
    elapsed_s=200.4,
    left_s=84.98,
    recent=(
        Recent("841", "We study soil moisture", "Wetter soils raise uptake", "stop"),
        Recent("840", "A method for aligning", "A robust alignment", "length"),
        Recent("('a', 2)", "<img src=x onerror=alert(1)>", "not valid JSON", "error"),
        Recent("839", "", "'abstract' is null", "skipped"),
    ),
)


class ScriptedJob:
    """A job that is wherever a test wants it."""

    def __init__(self) -> None:
        self.now = SNAPSHOT
        self.reads = 0
        self.calls: list[tuple[str, float]] = []

    def snapshot(self) -> Snapshot:
        self.reads += 1
        return self.now

    def pause(self) -> None:
        self._called("pause", "paused")

    def resume(self) -> None:
        self._called("resume", "running")

    def stop(self) -> None:
        self._called("stop", "stopped")

    def _called(self, name: str, state: Any) -> None:
        self.calls.append((name, time.monotonic()))
        self.now = replace(self.now, state=state)


class Engine:
    """Something that may fail."""

    why: str | None = None

    def failure(self) -> str | None:
        return self.why


@pytest.fixture(scope="module")
def fixture() -> dict[str, Any]:
    return json.loads(FIXTURE.read_text(encoding="utf-8"))["batch"]


@pytest.fixture
def job() -> ScriptedJob:
    return ScriptedJob()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def about(engine: Engine) -> About:
    return About("df.abstract", engine.failure, "%mlx_engine restart")


@pytest.fixture
def widget(job: ScriptedJob, about: About) -> Iterator[BatchWidget]:
    widget = BatchWidget(job, about)
    yield widget
    widget.close()


def look(widget: BatchWidget) -> None:
    widget._handle_custom_msg({"kind": "view", "view": "v1", "order": 1, "open": True}, [])


def press(widget: BatchWidget, action: str) -> None:
    widget._handle_custom_msg({"kind": "job", "action": action}, [])


def eventually(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.01)
    return condition()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mlx_nb widget"]


def test_a_snapshot_becomes_the_traits_of_the_fixture(widget: BatchWidget, fixture: dict[str, Any]) -> None:
    expected = fixture["traits"] | {"tokens": {"samples": [486.3], "peak": 486.3}}
    assert {name: getattr(widget, name) for name in expected} == expected


def test_the_fixture_names_every_trait_and_field(fixture: dict[str, Any]) -> None:
    hints = typing.get_type_hints(wire.BatchTraits)
    assert set(fixture["traits"]) == set(hints)
    for name in ("job", "counts", "pace", "tokens"):
        assert set(fixture["traits"][name]) == set(typing.get_type_hints(hints[name])), name
    for result in fixture["traits"]["results"]:
        assert set(result) == set(typing.get_type_hints(wire.RowResult))


def test_every_message_of_the_view_is_understood_and_no_other(fixture: dict[str, Any]) -> None:
    messages = fixture["messages"]
    assert [wire.parse_message(messages[name]) for name in ("pause", "resume", "stop")] == [
        wire.JobCommand("pause"),
        wire.JobCommand("resume"),
        wire.JobCommand("stop"),
    ]
    assert [wire.parse_message(message) for message in fixture["refused"]] == [None] * len(fixture["refused"])


def test_without_a_view_nothing_is_read(job: ScriptedJob, widget: BatchWidget) -> None:
    reads = job.reads
    time.sleep(0.5)
    assert job.reads == reads
    assert not threads()


def test_an_open_view_reads_at_most_five_times_a_second(job: ScriptedJob, widget: BatchWidget) -> None:
    look(widget)
    assert eventually(lambda: job.reads > 2)
    before, start = job.reads, time.monotonic()
    time.sleep(1.1)
    assert 2 <= job.reads - before <= (time.monotonic() - start) * 5 + 1


def test_the_buttons_act_at_once_and_the_view_says_so(job: ScriptedJob, widget: BatchWidget) -> None:
    for action, state in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
        pressed = time.monotonic()
        press(widget, action)
        assert eventually(lambda state=state: widget.job["state"] == state)
        name, when = job.calls[-1]
        assert name == action
        assert when - pressed < 0.3
    assert len(job.calls) == 3


def test_the_time_left_of_a_paused_job_is_unknown(job: ScriptedJob, widget: BatchWidget) -> None:
    press(widget, "pause")
    assert eventually(lambda: widget.pace["left"] is None)
    assert widget.job["ended"] is None


def test_the_end_is_shown_though_nobody_looks(job: ScriptedJob, widget: BatchWidget) -> None:
    job.now = replace(
        SNAPSHOT, state="finished", done=1200, running=0, rows_per_second=4.0, elapsed_s=300.0, left_s=0.0
    )
    widget.end()
    assert widget.job["state"] == "finished"
    assert widget.job["ended"] is not None
    assert (widget.counts["done"], widget.pace["rows"], widget.pace["elapsed"]) == (1170, 4.0, 300.0)
    widget.end()


def test_after_the_end_nothing_reads_and_no_thread_is_left(job: ScriptedJob, widget: BatchWidget) -> None:
    look(widget)
    assert eventually(lambda: bool(threads()))
    job.now = replace(SNAPSHOT, state="stopped")
    widget.end()
    reads = job.reads
    look(widget)
    press(widget, "resume")
    time.sleep(0.3)
    assert not threads()
    assert (job.reads, job.calls) == (reads, [])
    assert widget.job["state"] == "stopped"


def test_a_view_does_not_keep_its_job(about: About) -> None:
    job = ScriptedJob()
    widget = BatchWidget(job, about)
    job.now = replace(SNAPSHOT, state="finished")
    widget.end()
    gone = weakref.ref(job)
    del job
    gc.collect()
    assert gone() is None
    assert widget.job["state"] == "finished"
    widget.close()


def test_an_engine_that_fails_fails_the_job(job: ScriptedJob, engine: Engine, widget: BatchWidget) -> None:
    engine.why = "Metal ran out of memory"
    look(widget)
    assert eventually(lambda: widget.job["state"] == "error")
    assert (widget.job["failure"], widget.job["command"]) == (
        "Metal ran out of memory",
        "%mlx_engine restart",
    )
    job.now = replace(SNAPSHOT, state="finished", done=1200, failed=365)
    widget.end()
    assert (widget.job["state"], widget.counts["failed"]) == ("error", 365)


@pytest.mark.parametrize(("failed", "state"), [(0, "finished"), (5, "error")])
def test_an_engine_that_is_stopped_after_the_last_row_does_not(
    job: ScriptedJob, engine: Engine, widget: BatchWidget, failed: int, state: str
) -> None:
    engine.why = "It was stopped."
    job.now = replace(SNAPSHOT, state="finished", done=1200, failed=failed)
    widget.end()
    assert widget.job["state"] == state


def test_what_all_prompts_begin_with_is_left_out(job: ScriptedJob, about: About) -> None:
    def asked(*texts: str) -> None:
        rows = [Recent(str(i), f"Summarise in one word: {text}", "", "stop") for i, text in enumerate(texts)]
        job.now = replace(SNAPSHOT, recent=(*rows, Recent("9", "", "'text' is null", "skipped")))

    def shown() -> list[str]:
        return [result["prompt"] for result in widget._read()["results"]]

    asked("a tree", "a tree")
    widget = BatchWidget(job, about)
    assert shown() == ["Summarise in one word: a tree", "Summarise in one word: a tree", ""]
    asked("a tree", "a house")
    assert shown() == ["… tree", "… house", ""]
    asked("the sea")
    assert shown() == ["… the sea", ""]
    asked("a tree", "a house")
    assert shown() == ["… a tree", "… a house", ""]
    widget.close()


def test_a_million_rows_are_no_more_to_send(job: ScriptedJob, about: About) -> None:
    long = "word " * 10_000
    job.now = replace(
        SNAPSHOT,
        total=1_000_000,
        done=999_999,
        recent=tuple(Recent(str(i), f"{i} {long}", long, "stop") for i in range(20)),
    )
    widget = BatchWidget(job, about)
    assert len(json.dumps(widget.get_state(["job", "counts", "pace", "tokens", "results"]))) < 12_000
    widget.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"state": "finished", "total": 200, "done": 200, "failed": 3, "skipped": 1, "elapsed_s": 12.34},
            "200 rows · 196 done · 3 failed · 1 skipped · 12.3 s",
        ),
        (
            {"state": "finished", "total": 1, "done": 1, "failed": 0, "skipped": 0, "elapsed_s": 0.04},
            "1 row · 1 done · 0.0 s",
        ),
        (
            {"state": "stopped", "failed": 0, "elapsed_s": 286.1},
            "842 of 1,200 rows · 819 done · 23 skipped · stopped after 4 min 46 s",
        ),
        ({"elapsed_s": 7500.0}, "842 of 1,200 rows · 812 done · 7 failed · 23 skipped · running"),
        (
            {
                "state": "finished",
                "total": 9000,
                "done": 9000,
                "failed": 0,
                "skipped": 0,
                "elapsed_s": 7500.0,
            },
            "9,000 rows · 9,000 done · 2 h 05 min",
        ),
        ({"state": "paused", "skipped": 0}, "842 of 1,200 rows · 835 done · 7 failed · paused"),
    ],
)
def test_a_saved_notebook_keeps_one_line(
    job: ScriptedJob, about: About, changes: dict[str, Any], text: str
) -> None:
    job.now = replace(SNAPSHOT, **changes)
    assert as_text(read(job, about)) == text
    assert text in as_html(read(job, about))


def test_the_line_of_a_failed_job_says_why_and_is_escaped(
    job: ScriptedJob, engine: Engine, about: About
) -> None:
    engine.why = "<script>alert(1)</script>"
    last = read(job, about)
    assert as_text(last).endswith("· <script>alert(1)</script>")
    assert "<script" not in as_html(last)
    assert "&lt;script&gt;" in as_html(last)


def test_the_bundle_of_a_display_has_the_line_and_the_view(widget: BatchWidget) -> None:
    data, _ = widget._repr_mimebundle_()
    assert data["text/plain"] == "842 of 1,200 rows · 812 done · 7 failed · 23 skipped · running"
    assert "mlx-nb-batch-snapshot" in data["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in data
