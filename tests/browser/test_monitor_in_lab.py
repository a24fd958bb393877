"""The monitor as a person meets it: in JupyterLab, while cells run."""

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lab import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(180)]

START = """\
import time
from mlx_nb import EngineConfig, EngineCore, SamplingParams
from mlx_nb.backends.fake import fake_backend
from mlx_nb.widgets import MonitorWidget

core = EngineCore(None, None, EngineConfig(model_name="demo"), backend=fake_backend(step_s=0.02))
core.launch()
for name in ("7f3a", "91bc", "a04d"):
    core.submit("Summarise the incident report below", SamplingParams(max_tokens=3000), name)
monitor = MonitorWidget(core)
"""
SHOW = "from IPython.display import display\ndisplay(monitor)\n"
BUSY = """\
end = time.time() + 45
while time.time() < end and core.get_stats()["num_running"] > {left}:
    time.sleep(0.01)
print("running", core.get_stats()["num_running"])
"""
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
ABORT = "button[aria-label='Abort 7f3a']"


def tokens_of_last_row(notebook: "Notebook") -> str:
    return notebook.page.locator(".monitor tbody tr").last.locator(".phase div").inner_text()


def show(notebook: "Notebook") -> None:
    notebook.run(0)
    notebook.page.wait_for_selector(".monitor tbody tr")


def test_numbers_move_and_abort_acts_while_a_cell_is_busy(lab: "Lab") -> None:
    with lab.notebook("busy", [START + SHOW, BUSY.format(left=0)]) as notebook:
        show(notebook)
        notebook.run(1, wait=False)
        notebook.page.wait_for_timeout(500)
        assert notebook.is_busy(1)

        seen = set()
        for _ in range(8):
            seen.add(tokens_of_last_row(notebook))
            notebook.page.wait_for_timeout(250)
        assert len(seen) >= 4, seen

        start = time.monotonic()
        notebook.page.click(ABORT)
        notebook.page.wait_for_selector(ABORT, state="detached", timeout=3000)
        assert time.monotonic() - start < 0.5

        notebook.page.click("[data-do='abort-all']")
        notebook.page.click("[data-do='abort-all']")
        notebook.page.wait_for_selector(".monitor .empty", timeout=3000)
        assert notebook.page.locator(".monitor .state").inner_text() == "Idle"
        notebook.wait_done(1, seconds=2)
        assert "running 0" in notebook.cell(1).inner_text()


def test_a_monitor_shown_by_the_busy_cell_itself_moves(lab: "Lab") -> None:
    with lab.notebook("same_cell", [START + SHOW + BUSY.format(left=2)]) as notebook:
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
        views.nth(0).locator("[data-do='stop']").click()
        views.nth(0).locator("[data-do='stop']").click()
        notebook.page.locator(".monitor[data-state='stopped']").nth(1).wait_for(timeout=3000)
        notebook.page.wait_for_timeout(500)
        assert views.nth(0).inner_text() == views.nth(1).inner_text()
        assert "%mlx_engine start demo" in views.nth(0).inner_text()
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
    [output] = saved.cells[0].outputs
    assert output.data["text/plain"].startswith("Engine monitor: moving, running · 3 running")
    with lab.open("reopened", saved, kernel=False) as notebook:
        snapshot = notebook.page.locator(".mlx-nb-monitor-snapshot")
        snapshot.wait_for(timeout=20_000)
        assert "3 running, 0 waiting, 0 finished" in snapshot.inner_text()
        notebook.picture("monitor_snapshot", notebook.cell(0))


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_the_monitor_keeps_its_height_and_fits_every_width(lab: "Lab", theme: str) -> None:
    failed = (
        "engine.state, engine.failure = 'failed', MemoryError('Metal ran out of memory in request c12e.')"
    )
    with lab.notebook(f"look_{theme}", [STAND_IN, "engine.abort_all()", failed]) as notebook:
        notebook.command("apputils:change-theme", theme=f"JupyterLab {theme}")
        show(notebook)
        notebook.page.wait_for_timeout(2000)
        monitor = notebook.page.locator(".monitor")
        heights: dict[str, set[float]] = {"wide": set(), "medium": set(), "narrow": set()}
        for index, state in enumerate(("running", "idle", "error")):
            if index:
                notebook.run(index)
            notebook.page.wait_for_selector(f".monitor[data-state='{state}']")
            for width, name in ((1280, "wide"), (960, "medium"), (600, "narrow")):
                notebook.page.set_viewport_size({"width": width, "height": 900})
                notebook.page.wait_for_timeout(300)
                notebook.picture(f"monitor_{theme.lower()}_{name}_{state}", monitor)
                box = monitor.bounding_box()
                assert box is not None
                heights[name].add(box["height"])
                assert monitor.evaluate(STICKING_OUT) == [], name
        assert [len(each) for each in heights.values()] == [1, 1, 1], heights
