"""The monitor as a person meets it: in JupyterLab, while cells run."""

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lab import Lab, Notebook
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(180)]

START = """\
import asyncio, time
from mlx_nb import EngineConfig, EngineCore, SamplingParams
from mlx_nb.backends.fake import fake_backend
from mlx_nb.widgets import MonitorWidget

core = EngineCore(None, None, EngineConfig(model_name="demo"), backend=fake_backend(step_s=0.02))
core.launch()
core.generate_sync("Something for the prefix cache", SamplingParams(max_tokens=1))
for name in ("7f3a", "91bc", "a04d"):
    core.submit("Summarise the incident report below", SamplingParams(max_tokens=3000), name)
monitor = MonitorWidget(core, name="demo")
"""
SHOW = "from IPython.display import display\ndisplay(monitor)\n"
BUSY = """\
end, stopped = time.time() + 45, False
while time.time() < end and not (stopped and core.is_running()):
    stopped = stopped or core.state == "stopped"
    {wait}
print("running", core.get_stats()["num_running"])
"""
WAITS = {"sync": "time.sleep(0.01)", "awaited": "await asyncio.sleep(0.01)"}
BUSY_WITH_TWO = """\
end = time.time() + 45
while time.time() < end and core.get_stats()["num_running"] > 2:
    time.sleep(0.01)
print("running", core.get_stats()["num_running"])
"""
ACT = """async (view, [selector]) => {
  const start = performance.now();
  const seconds = () => (performance.now() - start) / 1000;
  view.querySelector(selector).click();
  while (!(UNTIL) && seconds() < 3) await new Promise((go) => setTimeout(go, 5));
  return seconds();
}"""
STAND_IN = """\
import time
from moving_engine import MovingEngine
from mlx_nb.widgets import MonitorWidget

engine = MovingEngine()
for name in ("7f3a", "91bc", "a04d"):
    engine.submit("Summarise <b>the incident report</b> below in five bullet points", 2000, name)
monitor = MonitorWidget(engine)
monitor
"""
STICKING_OUT = """monitor => {
  const right = monitor.getBoundingClientRect().right;
  return [...monitor.querySelectorAll(":not(thead *)")]
    .filter((part) => part.getClientRects().length && part.getBoundingClientRect().right > right + 0.5)
    .map((part) => part.outerHTML);
}"""
TEXTS = "[...document.querySelectorAll('.monitor')].map((view) => view.innerText)"
ABORT = "button[aria-label='Abort 7f3a']"
COUNT_UPDATES = """() => {
  window.updates = 0;
  window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.iopubMessage.connect((_, message) => {
    if (message.header.msg_type === "comm_msg") window.updates += 1;
  });
}"""
RESTART_KERNEL = "window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.restart()"
THOUSANDS = """\
core = EngineCore(None, None, EngineConfig(model_name="many"), backend=fake_backend())
core.launch()
monitor = MonitorWidget(core)
def serve(count):
    core.generate_batch_sync(["Say something"] * count, SamplingParams(max_tokens=2))
serve(1)
"""
STATES = {
    "running": "",
    "idle": "engine.abort_all()",
    "paused": "engine.paused = True; engine.submit('Waits until it is resumed', 2000, 'e5d0')",
    "over": "engine.paused = False; engine.kv = 3_900_000_000; engine.slots = 32",
    "unloaded": "engine.abort_all(); engine.loaded = False",
    "loading": "engine.state = 'loading'",
    "stopped": "engine.state = 'stopped'",
    "error": "engine.state, engine.failure = 'failed', MemoryError('Metal ran out of memory in request c12e.')",
}


def act(monitor: "Locator", selector: str, until: str) -> float:
    """Press a button of a monitor; return how many seconds it took until the monitor showed what came of it."""
    seconds: float = monitor.evaluate(ACT.replace("UNTIL", until), [selector])
    return seconds


def page_size(notebook: "Notebook") -> tuple[float, float]:
    """Bytes of live objects and nodes of the page."""
    session = notebook.page.context.new_cdp_session(notebook.page)
    session.send("Performance.enable")
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
    metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return metrics["JSHeapUsedSize"], metrics["Nodes"]


def tokens_of_last_row(notebook: "Notebook") -> str:
    return notebook.page.locator(".monitor tbody tr").last.locator(".phase div").inner_text()


def show(notebook: "Notebook") -> None:
    notebook.run(0)
    notebook.page.wait_for_selector(".monitor tbody tr")


@pytest.mark.parametrize("kind", ["sync", "awaited"])
def test_numbers_move_and_buttons_act_while_a_cell_is_busy(lab: "Lab", kind: str) -> None:
    with lab.notebook(f"busy_{kind}", [START + SHOW, BUSY.format(wait=WAITS[kind])]) as notebook:
        show(notebook)
        notebook.run(1, wait=False)
        notebook.page.wait_for_timeout(500)
        assert notebook.is_busy(1)

        seen = set()
        for _ in range(8):
            seen.add(tokens_of_last_row(notebook))
            notebook.page.wait_for_timeout(250)
        assert len(seen) >= 4, seen

        monitor = notebook.page.locator(".monitor")
        armed = "view.querySelector(\"[data-do='{}'][data-armed]\")"
        in_state = "view.dataset.state === '{}'"
        took = {
            "abort": act(monitor, ABORT, f'!view.querySelector("{ABORT}")'),
            "pause": act(monitor, "[data-do='pause']", in_state.format("paused")),
            "resume": act(monitor, "[data-do='pause']", in_state.format("running")),
            "clear": act(
                monitor,
                "[data-do='clear']",
                "view.querySelector(\"[data-prefix='entries']\").textContent === '0'",
            ),
        }
        act(monitor, "[data-do='abort-all']", armed.format("abort-all"))
        took["abort all"] = act(monitor, "[data-do='abort-all']", in_state.format("idle"))
        act(monitor, "[data-do='stop']", armed.format("stop"))
        took["stop"] = act(monitor, "[data-do='stop']", in_state.format("stopped"))
        assert notebook.is_busy(1)
        assert "%mlx_engine restart demo" in monitor.inner_text()
        took["restart"] = act(monitor, "[data-do='restart']", "view.dataset.state !== 'stopped'")
        assert max(took.values()) < 0.3, took
        notebook.page.wait_for_selector(".monitor[data-state='idle']", timeout=3000)
        notebook.wait_done(1, seconds=2)
        assert "running 0" in notebook.cell(1).inner_text()


def test_a_monitor_shown_by_the_busy_cell_itself_moves(lab: "Lab") -> None:
    with lab.notebook("same_cell", [START + SHOW + BUSY_WITH_TWO]) as notebook:
        notebook.run(0, wait=False)
        notebook.page.wait_for_selector(".monitor tbody tr")
        before = tokens_of_last_row(notebook)
        notebook.page.wait_for_timeout(1500)
        assert notebook.is_busy(0)
        assert tokens_of_last_row(notebook) != before
        notebook.page.click(ABORT)
        notebook.wait_done(0, seconds=2)
        assert "running 2" in notebook.cell(0).inner_text()


def test_two_views_agree_and_a_stopped_engine_says_how_to_start(lab: "Lab") -> None:
    with lab.notebook("two_views", [START + SHOW, "monitor"]) as notebook:
        show(notebook)
        notebook.run(1)
        views = notebook.page.locator(".monitor")
        views.nth(1).wait_for()
        notebook.page.wait_for_timeout(500)
        moments = [
            notebook.page.evaluate(TEXTS) for _ in range(12) if not notebook.page.wait_for_timeout(150)
        ]
        assert all(first == second for first, second in moments)
        assert len({first for first, _ in moments}) >= 4, moments
        views.nth(0).locator("[data-do='stop']").click()
        views.nth(0).locator("[data-do='stop']").click()
        notebook.page.locator(".monitor[data-state='stopped']").nth(1).wait_for(timeout=3000)
        notebook.page.wait_for_timeout(500)
        assert views.nth(0).inner_text() == views.nth(1).inner_text()
        assert "%mlx_engine restart demo" in views.nth(0).inner_text()
        notebook.picture("monitor_stopped", views.nth(0))


def test_the_engine_is_read_only_while_somebody_looks(lab: "Lab") -> None:
    count = "before = engine.reads; time.sleep(1); print('reads', engine.reads - before)"
    with lab.notebook("reads", [STAND_IN, count, count]) as notebook:
        show(notebook)
        notebook.run(1)
        reads = int(notebook.cell(1).locator(".jp-OutputArea").inner_text().split("reads")[1])
        assert 3 <= reads <= 6
        notebook.page.evaluate("window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0")
        notebook.command("notebook:clear-cell-output")
        notebook.page.wait_for_selector(".monitor", state="detached")
        notebook.run(2)
        assert "reads 0" in notebook.cell(2).inner_text()


def test_a_notebook_opened_without_its_kernel_shows_the_snapshot(lab: "Lab") -> None:
    with lab.notebook("saved", [STAND_IN]) as notebook:
        show(notebook)
        saved = notebook.save()
    [output, _view] = saved.cells[0].outputs
    assert output.data["text/plain"].startswith("Engine monitor: moving, running · 3 running")
    with lab.open("reopened", saved, kernel=False) as notebook:
        snapshot = notebook.page.locator(".mlx-nb-monitor-snapshot")
        snapshot.wait_for(timeout=20_000)
        assert "3 running, 0 waiting, 0 finished" in snapshot.inner_text()
        notebook.picture("monitor_snapshot", notebook.cell(0))


def test_a_notebook_reopened_with_a_fresh_kernel_shows_the_snapshot(lab: "Lab") -> None:
    with lab.notebook("fresh", ["%load_ext mlx_nb\n" + STAND_IN]) as notebook:
        show(notebook)
        notebook.save()
        notebook.page.evaluate(RESTART_KERNEL)
        notebook.page.reload()
        snapshot = notebook.page.locator(".mlx-nb-snapshot")
        snapshot.wait_for(timeout=60_000)
        notebook.page.wait_for_timeout(2000)
        assert snapshot.is_visible()
        assert "3 running, 0 waiting, 0 finished" in snapshot.inner_text()
        assert "odel not found" not in notebook.cell(0).inner_text()
        notebook.picture("monitor_fresh", notebook.cell(0))


def test_ten_thousand_requests_leave_the_page_as_it_was(lab: "Lab") -> None:
    cells = [
        START + THOUSANDS + SHOW,
        "serve(1000)",
        "serve(9000)\nprint(core.get_stats()['num_requests_processed'])",
    ]
    with lab.notebook("thousands", cells) as notebook:
        notebook.run(0)
        notebook.page.wait_for_selector(".monitor")
        notebook.run(1, seconds=60)
        notebook.page.wait_for_timeout(1000)
        heap, nodes = page_size(notebook)
        notebook.page.evaluate(COUNT_UPDATES)
        start = time.monotonic()
        notebook.run(2, seconds=90)
        notebook.page.wait_for_timeout(1000)
        seconds = time.monotonic() - start
        updates = notebook.page.evaluate("window.updates")
        assert "10001" in notebook.cell(2).inner_text()
        assert 2 <= updates <= 5 * seconds + 2
        heap_after, nodes_after = page_size(notebook)
        assert heap_after - heap < 3_000_000
        assert nodes_after - nodes < 500


def test_a_sparkline_is_read_by_keyboard_and_mouse(lab: "Lab") -> None:
    with lab.notebook("spark", [STAND_IN]) as notebook:
        show(notebook)
        notebook.page.wait_for_timeout(3000)
        monitor = notebook.page.locator(".monitor")
        spark = monitor.locator("[data-rate='decode'] .spark")
        unit = monitor.locator("[data-rate='decode'] figcaption span").last
        spark.focus()
        for _ in range(2):
            notebook.page.keyboard.press("ArrowLeft")
        assert unit.inner_text() == "2 s ago"
        assert spark.get_attribute("aria-valuetext") == "150.0 tokens per second, 2 seconds ago"
        notebook.picture("monitor_read", monitor)
        notebook.page.keyboard.press("Tab")
        assert unit.inner_text() == "tok/s"
        spark.hover()
        assert unit.inner_text().endswith("s ago")


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_the_monitor_keeps_its_height_and_fits_every_width(lab: "Lab", theme: str) -> None:
    from axe import axe_violations

    with lab.notebook(f"look_{theme}", [STAND_IN, *list(STATES.values())[1:]]) as notebook:
        notebook.command("apputils:change-theme", theme=f"JupyterLab {theme}")
        show(notebook)
        notebook.page.wait_for_timeout(2000)
        monitor = notebook.page.locator(".monitor")
        widths = {"wide": 1280, "medium": 960, "narrow": 600}
        heights: dict[str, set[float]] = {name: set() for name in widths}
        for index, state in enumerate(STATES):
            if index:
                notebook.run(index)
            notebook.page.wait_for_selector(
                f".monitor[data-state='{'running' if state == 'over' else state}']"
            )
            notebook.page.wait_for_timeout(250)
            for name, width in widths.items():
                notebook.page.set_viewport_size({"width": width, "height": 900})
                notebook.page.wait_for_timeout(300)
                notebook.picture(f"monitor_{theme.lower()}_{name}_{state}", monitor)
                box = monitor.bounding_box()
                assert box is not None
                heights[name].add(box["height"])
                assert monitor.evaluate(STICKING_OUT) == [], name
            assert axe_violations(notebook.page, ".monitor") == [], state
        assert [len(each) for each in heights.values()] == [1, 1, 1], heights
