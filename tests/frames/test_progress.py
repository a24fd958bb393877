"""What a job shows of itself: a view where widgets are, a bar where not, and nothing that outlives it."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

import mlx_nb
from mlx_nb.backends.fake import text_tokens
from mlx_nb.errors import RequestError
from mlx_nb.frames.results import GenerationInterrupted
from mlx_nb.widgets import BatchWidget, outputs

VIEW = "application/vnd.jupyter.widget-view+json"
LONG = pd.Series([f"row {i}" for i in range(80)])
ENDLESS = pd.Series([f"row {i}" for i in range(2000)])


class Cell:
    """What was published, in order; what replaced an output stands where that one was."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []
        self.threads: list[str] = []
        self._places: dict[str, int] = {}

    def publish(self, data: Any, metadata: Any, *, display_id: str | None, update: bool) -> None:
        self.threads.append(threading.current_thread().name)
        if update:
            self.outputs[self._places[display_id or ""]] = dict(data)
            return
        if display_id is not None:
            self._places[display_id] = len(self.outputs)
        self.outputs.append(dict(data))

    @property
    def lines(self) -> list[str]:
        return [output["text/plain"] for output in self.outputs]


@pytest.fixture
def cell() -> Iterator[Cell]:
    cell = Cell()
    outputs.publish_with(cell.publish)
    yield cell
    outputs.publish_with(None)


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[BatchWidget]:
    """Return the views that were made."""
    made: list[BatchWidget] = []
    show = BatchWidget.show

    def record(widget: BatchWidget, **kwargs: Any) -> bool:
        made.append(widget)
        return show(widget, **kwargs)

    monkeypatch.setattr(BatchWidget, "show", record)
    return made


@pytest.fixture
def slow(adopt: Any) -> mlx_nb.EngineCore:
    """Return an engine that takes about 0.8 s for `LONG`, rows that say "fail" excepted."""
    return adopt(lambda request: text_tokens("a long answer"), step_s=0.003)


def test_a_short_job_leaves_one_line(engine: Any, cell: Cell, views: list[BatchWidget]) -> None:
    pd.Series(["a", "fail", None]).mlx.generate()

    [line] = cell.lines
    assert line.startswith("3 rows · 1 done · 1 failed · 1 skipped · 0.")
    assert "mlx-nb-snapshot" not in cell.outputs[0]["text/html"], "it would hide the output after it"
    assert views == []


def test_a_longer_job_has_a_view_that_stays(slow: Any, cell: Cell, views: list[BatchWidget]) -> None:
    result = LONG.mlx.generate("Say: {{ text }}")

    assert (result["state"] == "done").all()
    snapshot, view = cell.outputs
    assert snapshot["text/plain"].startswith("80 rows · 80 done · ")
    assert VIEW in view
    assert "mlx_nb progress" in cell.threads, "the job doesn't wait for its view"
    [widget] = views
    assert (widget.job["state"], widget.job["title"]) == ("finished", "Say: {{ text }}")
    assert widget.counts["done"] == 80
    assert not [thread for thread in threading.enumerate() if thread.name == "mlx_nb progress"]


async def test_an_awaited_job_has_one_too(slow: Any, cell: Cell, views: list[BatchWidget]) -> None:
    await LONG.mlx.agenerate()

    assert cell.lines[0].startswith("80 rows · 80 done · ")
    assert [widget.job["state"] for widget in views] == ["finished"]


def test_stop_gives_the_frame_as_far_as_it_came(slow: Any, cell: Cell, views: list[BatchWidget]) -> None:
    def stop() -> None:
        while not views:
            time.sleep(0.01)
        views[0]._handle_custom_msg({"kind": "job", "action": "stop"}, [])

    threading.Thread(target=stop).start()
    result = ENDLESS.mlx.generate()

    done = int((result["state"] == "done").sum())
    assert 0 < done < 2000
    assert (result["state"] == "aborted").sum() == 2000 - done
    assert views[0].job["state"] == "stopped"
    assert cell.lines[0].startswith(f"{done:,} of 2,000 rows · {done:,} done · stopped after ")


def test_a_view_counts_as_the_frame_does(adopt: Any, cell: Cell) -> None:
    adopt(
        lambda request: text_tokens('{"n": 1' if b"cut" in bytes(request.prompt_token_ids) else '{"n": 2}'),
        structured=True,
    )
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    result = pd.Series(["cut", "whole"]).mlx.generate(schema=schema)

    assert result["state"].tolist() == ["truncated", "done"]
    assert cell.lines[0].startswith("2 rows · 2 done · 0.")


def test_an_engine_that_stops_fails_the_view(slow: Any, cell: Cell, views: list[BatchWidget]) -> None:
    def stop() -> None:
        while not views:
            time.sleep(0.01)
        slow.stop_soon()

    threading.Thread(target=stop).start()
    ENDLESS.mlx.generate()

    assert views[0].job["state"] == "error"
    assert views[0].job["failure"] == "It was stopped."
    assert views[0].job["command"] == "%mlx_engine restart"


def test_an_interrupted_job_says_so(slow: Any, cell: Cell, views: list[BatchWidget]) -> None:
    def interrupt() -> None:
        while not views:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.get_ident()
    threading.Thread(target=interrupt).start()
    with pytest.raises(GenerationInterrupted) as interrupted:
        ENDLESS.mlx.generate()

    done = interrupted.value.done
    assert views[0].job["state"] == "stopped"
    assert cell.lines[0].startswith(f"{done:,} of 2,000 rows · {done:,} done · stopped after ")


def test_a_view_keeps_neither_frame_nor_engine(
    adopt: Any, session: Any, cell: Cell, views: list[BatchWidget]
) -> None:
    core = adopt(lambda request: text_tokens("a long answer"), step_s=0.003)
    frame = pd.DataFrame({"text": LONG})
    frame.mlx.generate("{{ text }}")
    gone = weakref.ref(frame), weakref.ref(core)
    session.stop_all()
    del frame, core
    gc.collect()

    assert [ref() for ref in gone] == [None, None]
    assert views[0].job["state"] == "finished"


def test_a_job_can_be_told_to_show_nothing(slow: Any, cell: Cell, capsys: Any) -> None:
    LONG.mlx.generate(progress=False)

    assert cell.outputs == []
    assert capsys.readouterr().err == ""


def test_a_bar_can_be_asked_for(engine: Any, cell: Cell, capsys: Any) -> None:
    pd.Series(["a", "fail", None]).mlx.generate(progress="bar")

    assert cell.outputs == []
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "failed=1" in shown


def test_a_bar_moves_while_the_job_runs(slow: Any, capsys: Any) -> None:
    LONG.mlx.generate()

    counts = {part.split("/")[0].split()[-1] for part in capsys.readouterr().err.split("\r") if "/80" in part}
    assert len(counts) >= 3, counts


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        ("widget", "needs a notebook with the extension: run %load_ext mlx_nb"),
        ("line", "got 'line'"),
        (2, "got 2"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_anything_runs(
    engine: Any, progress: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        pd.Series(["a"]).mlx.generate(progress=progress)
    assert engine.get_stats()["num_requests_processed"] == 0


def test_a_page_that_is_gone_does_not_stop_the_job(slow: Any, caplog: Any) -> None:
    def publish(data: Any, metadata: Any, *, display_id: str | None, update: bool) -> None:
        if display_id is not None:
            raise OSError("no page")

    outputs.publish_with(publish)
    try:
        result = LONG.mlx.generate()
    finally:
        outputs.publish_with(None)

    assert (result["state"] == "done").all()
    assert "can't be shown" in caplog.text
