"""The monitor without a browser: its pace, its buttons, its end, and what a saved notebook keeps."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from moving_engine import MovingEngine

from mlx_nb import EngineConfig, EngineCore
from mlx_nb.backends.fake import fake_backend
from mlx_nb.widgets import MonitorWidget
from mlx_nb.widgets.feed import Feed
from mlx_nb.widgets.outputs import publish_with
from mlx_nb.widgets.protocol import ViewChange

VIEW = {"kind": "view", "view": "v1", "order": 1, "open": True}


class Browser:
    """The other end of a widget: counts the updates that arrive and sends what a view sends."""

    def __init__(self, widget: MonitorWidget, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widget = widget
        self.updates: list[set[str]] = []
        send = widget.send_state

        def record(key: Any = None) -> None:
            if key:
                self.updates.append(set(key))
            send(key)

        monkeypatch.setattr(widget, "send_state", record)

    def send(self, content: dict[str, Any]) -> None:
        self.widget._handle_custom_msg(content, [])

    def look(self, view: str = "v1", order: int = 1) -> None:
        self.send({"kind": "view", "view": view, "order": order, "open": True})

    def look_away(self, view: str = "v1", order: int = 2) -> None:
        self.send({"kind": "view", "view": view, "order": order, "open": False})


@pytest.fixture
def engine() -> MovingEngine:
    return MovingEngine()


@pytest.fixture
def widget(engine: MovingEngine) -> Iterator[MonitorWidget]:
    widget = MonitorWidget(engine)
    yield widget
    widget.close()


@pytest.fixture
def browser(widget: MonitorWidget, monkeypatch: pytest.MonkeyPatch) -> Browser:
    return Browser(widget, monkeypatch)


def eventually(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def monitor_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "mlx_nb widget"}


def test_shows_the_engine_at_once(engine: MovingEngine) -> None:
    engine.submit("hello")
    widget = MonitorWidget(engine)
    assert widget.engine["state"] == "running"
    assert widget.rows == [{"id": "r0", "prompt": "hello"}]
    widget.close()


def test_without_a_view_nothing_is_read_or_sent(engine: MovingEngine, browser: Browser) -> None:
    engine.submit("hello")
    reads = engine.reads
    time.sleep(0.5)
    assert engine.reads == reads
    assert browser.updates == []
    assert not monitor_threads()


def test_an_open_view_gets_at_most_five_updates_a_second(engine: MovingEngine, browser: Browser) -> None:
    engine.submit("hello")
    browser.look()
    assert eventually(lambda: bool(browser.updates))
    before, start = len(browser.updates), time.monotonic()
    time.sleep(1.1)
    elapsed = time.monotonic() - start
    assert 2 <= len(browser.updates) - before <= elapsed * 5 + 1


def test_only_what_changed_is_sent(engine: MovingEngine, browser: Browser) -> None:
    engine.submit("hello")
    browser.look()
    assert eventually(lambda: len(browser.updates) >= 4)
    sent = set().union(*browser.updates[1:])
    assert "progress" in sent
    assert sent <= {"progress", "history"}


def test_an_idle_engine_sends_nothing_between_samples(browser: Browser) -> None:
    browser.look()
    time.sleep(1.2)
    assert all(update == {"history"} for update in browser.updates)
    assert len(browser.updates) <= 3


def test_updates_end_when_the_last_view_closes(engine: MovingEngine, browser: Browser) -> None:
    engine.submit("hello")
    browser.look("v1")
    browser.look("v2")
    browser.look_away("v1")
    count = len(browser.updates)
    assert eventually(lambda: len(browser.updates) > count + 1), "the second view still looks"
    browser.look_away("v2")
    time.sleep(0.3)
    reads = engine.reads
    time.sleep(0.5)
    assert engine.reads == reads


def test_a_late_open_does_not_bring_a_closed_view_back(engine: MovingEngine, browser: Browser) -> None:
    browser.look_away(order=2)
    browser.look(order=1)
    time.sleep(0.3)
    assert browser.updates == []
    browser.look(order=3)
    engine.submit("hello")
    assert eventually(lambda: bool(browser.updates))


def test_time_nobody_looked_is_unknown_in_the_history(
    engine: MovingEngine, widget: MonitorWidget, browser: Browser
) -> None:
    time.sleep(2.1)
    browser.look()
    assert eventually(lambda: len(widget.history["decode"]) >= 3)
    assert None in widget.history["decode"]
    assert widget.history["decode"][-1] == 0.0


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ({"kind": "abort", "request_id": "r0"}, ("abort", "r0")),
        ({"kind": "command", "command": "pause"}, ("pause",)),
        ({"kind": "command", "command": "resume"}, ("resume",)),
        ({"kind": "command", "command": "restart"}, ("restart_soon",)),
        ({"kind": "command", "command": "abort_all"}, ("abort_all",)),
        ({"kind": "command", "command": "clear_cache"}, ("clear_prefix_cache_soon",)),
        ({"kind": "command", "command": "stop"}, ("stop_soon",)),
    ],
)
def test_a_button_acts_at_once(
    engine: MovingEngine, browser: Browser, message: dict[str, Any], call: tuple[str, ...]
) -> None:
    engine.submit("hello")
    browser.look()
    clicked = time.time()
    browser.send(message)
    assert eventually(lambda: engine.calls == [call])
    assert engine.times[0] - clicked < 0.3


def test_a_button_does_not_wait_for_the_engine(engine: MovingEngine, browser: Browser) -> None:
    release = threading.Event()
    engine.clear_prefix_cache_soon = release.wait  # type: ignore[method-assign, assignment]
    start = time.monotonic()
    browser.send({"kind": "command", "command": "clear_cache"})
    assert time.monotonic() - start < 0.1
    release.set()


def test_a_button_that_fails_says_why_and_the_others_go_on(
    engine: MovingEngine, widget: MonitorWidget, browser: Browser
) -> None:
    def broken() -> None:
        raise RuntimeError("the cache is on fire")

    engine.clear_prefix_cache_soon = broken  # type: ignore[method-assign]
    browser.look()
    browser.send({"kind": "command", "command": "clear_cache"})
    assert eventually(lambda: widget.engine["notice"] == "the cache is on fire")
    browser.send({"kind": "command", "command": "abort_all"})
    assert eventually(lambda: engine.calls == [("abort_all",)])
    assert eventually(lambda: widget.engine["notice"] is None)


def test_an_unknown_message_changes_nothing(engine: MovingEngine, browser: Browser) -> None:
    browser.send({"kind": "command", "command": "format_disk"})
    browser.look()
    assert eventually(lambda: engine.reads > 1)
    assert engine.calls == []


def test_a_stopped_engine_shows_how_to_start_it(
    engine: MovingEngine, widget: MonitorWidget, browser: Browser
) -> None:
    browser.look()
    browser.send({"kind": "command", "command": "stop"})
    assert eventually(lambda: widget.engine["state"] == "stopped")
    assert widget.engine["command"] == "%mlx_engine start moving"


def test_the_command_names_the_engine_as_the_magic_does(engine: MovingEngine) -> None:
    engine.state = "stopped"
    widget = MonitorWidget(engine, name="my engine")
    assert widget.engine["command"] == "%mlx_engine restart 'my engine'"
    assert widget.engine["can_restart"]
    widget.close()


def test_a_closed_engine_can_only_be_made_anew(engine: MovingEngine) -> None:
    engine.state = "closed"
    widget = MonitorWidget(engine, name="default")
    assert (widget.engine["state"], widget.engine["can_restart"]) == ("stopped", False)
    assert widget.engine["command"] == "%mlx_engine start moving"
    widget.close()


def test_what_a_button_did_shows_at_once(
    engine: MovingEngine, widget: MonitorWidget, browser: Browser
) -> None:
    browser.look()
    for command, state in (("pause", "paused"), ("resume", "idle"), ("stop", "stopped"), ("restart", "idle")):
        start = time.monotonic()
        browser.send({"kind": "command", "command": command})
        assert eventually(lambda state=state: widget.engine["state"] == state)  # type: ignore[misc]
        assert time.monotonic() - start < 0.3


def test_a_model_that_left_memory_is_unloaded_until_a_request_comes(engine: MovingEngine) -> None:
    engine.loaded = False
    widget = MonitorWidget(engine)
    assert widget.engine["state"] == "unloaded"
    assert "unloaded (the model is not in memory)" in widget._as_text()
    engine.submit("hello")
    widget._publish()
    assert widget.engine["state"] == "running"
    widget.close()


def test_a_real_engine_is_paused_stopped_and_restarted() -> None:
    core = EngineCore(None, None, EngineConfig(model_name="fake"), backend=fake_backend())
    widget = MonitorWidget(core, name="default")
    browser_end = [
        ("restart", "idle"), ("pause", "paused"), ("resume", "idle"), ("stop", "stopped"), ("restart", "idle"),
    ]  # fmt: skip
    for command, state in browser_end:
        widget._handle_custom_msg({"kind": "command", "command": command}, [])
        widget._handle_custom_msg(VIEW, [])
        assert eventually(lambda state=state: widget.engine["state"] == state), command  # type: ignore[misc]
    widget.close()
    core.close()


def test_a_failed_engine_shows_its_reason(engine: MovingEngine) -> None:
    engine.state, engine.failure = "failed", MemoryError("Metal ran out\nof memory")
    widget = MonitorWidget(engine)
    assert (widget.engine["state"], widget.engine["failure"]) == ("error", "Metal ran out of memory")
    widget.close()


def test_statistics_that_raise_are_shown_as_an_error_and_recover(
    engine: MovingEngine, widget: MonitorWidget, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> dict[str, Any]:
        raise OSError("no statistics today")

    browser.look()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "get_stats", broken)
        assert eventually(lambda: widget.engine["state"] == "error")
        assert "no statistics today" in widget.engine["failure"]
    assert eventually(lambda: widget.engine["state"] == "idle")


def test_many_requests_are_counted_beyond_the_first_hundred(engine: MovingEngine) -> None:
    for index in range(130):
        engine.submit("hello", request_id=f"q{index}")
    widget = MonitorWidget(engine)
    assert (len(widget.rows), len(widget.progress), widget.hidden_requests) == (100, 100, 30)
    assert widget.load["running"] == 130
    widget.close()


def test_the_monitor_does_not_keep_its_engine_alive(browser: Browser) -> None:
    engine = MovingEngine()
    engine.submit("hello")
    widget = MonitorWidget(engine)
    ref = weakref.ref(engine)
    del engine
    gc.collect()
    assert ref() is None
    widget._handle_custom_msg(VIEW, [])
    assert eventually(lambda: widget.engine["state"] == "stopped")
    assert widget.rows == []
    widget.close()


def test_close_ends_the_thread(engine: MovingEngine, browser: Browser, widget: MonitorWidget) -> None:
    browser.look()
    assert monitor_threads()
    widget.close()
    assert not monitor_threads()
    widget.close()


def test_a_view_opened_after_close_starts_nothing(engine: MovingEngine) -> None:
    widget = MonitorWidget(engine)
    widget.close()
    widget._receive(widget, VIEW, [])
    assert not monitor_threads()


def test_a_closed_monitor_is_collectable(engine: MovingEngine) -> None:
    widget = MonitorWidget(engine)
    widget._handle_custom_msg(VIEW, [])
    widget.close()
    ref = weakref.ref(widget)
    del widget
    gc.collect()
    assert ref() is None


def test_a_feed_ends_when_what_it_publishes_for_is_gone() -> None:
    feed: Feed[str] = Feed(publish=lambda: False, act=lambda what: True)
    feed.view(ViewChange("v1", 1, open=True))
    assert eventually(lambda: not monitor_threads())


def test_text_fallback_is_one_line(engine: MovingEngine, widget: MonitorWidget) -> None:
    engine.submit("hello")
    data, _ = widget._repr_mimebundle_()
    counts = "1 running, 0 waiting, 0 finished"
    assert data["text/plain"] == f"Engine monitor: moving, running · {counts} · 50.0 tok/s"


def test_html_fallback_is_a_snapshot_without_script(engine: MovingEngine) -> None:
    engine.model_name = "<script>alert('model')</script>"
    engine.state, engine.failure = "failed", ValueError("<img src=x onerror=alert(1)>")
    widget = MonitorWidget(engine)
    data, _ = widget._repr_mimebundle_()
    html = data["text/html"]
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html
    assert "790 MB of 4.0 GB" in html
    assert "application/vnd.jupyter.widget-view+json" in data
    widget.close()


def test_an_export_to_html_has_the_snapshot(engine: MovingEngine, widget: MonitorWidget) -> None:
    nbformat = pytest.importorskip("nbformat")
    exporter = pytest.importorskip("nbconvert").HTMLExporter()
    engine.submit("hello")
    shown: list[dict[str, Any]] = []
    publish_with(lambda data, metadata, **_: shown.append(dict(data)))
    try:
        assert widget.show()
    finally:
        publish_with(None)
    outputs = [nbformat.v4.new_output("display_data", data) for data in shown]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("monitor", outputs=outputs)])
    page, _ = exporter.from_notebook_node(notebook)
    assert "1 running, 0 waiting, 0 finished" in page
    assert "790 MB of 4.0 GB" in page


def test_a_process_with_an_open_monitor_exits_cleanly() -> None:
    code = (
        "from moving_engine import MovingEngine\n"
        "from mlx_nb.widgets import MonitorWidget\n"
        "engine = MovingEngine(); engine.submit('hello')\n"
        "widget = MonitorWidget(engine)\n"
        f"widget._handle_custom_msg({VIEW!r}, [])\n"
        "import time; time.sleep(0.3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_widgets_import_neither_ipython_nor_mlx() -> None:
    code = (
        "import sys, anywidget; before = set(sys.modules); "
        "import mlx_nb.widgets; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "mlx_nb" in loaded
    assert not loaded & {"IPython", "ipykernel", "mlx", "mlx_lm", "pandas"}
