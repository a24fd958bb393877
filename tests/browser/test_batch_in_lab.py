"""A DataFrame job as a person meets it: in JupyterLab, while its cell runs and after."""

import re
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lab import Lab
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(180)]

START = """\
%load_ext mlx_nb
import re
import pandas as pd
from mlx_nb import AsyncEngineCore, EngineConfig, EngineCore, SchedulerConfig
from mlx_nb.backends.fake import EOS, fake_backend, text_tokens
from mlx_nb.session.session import default_session

def answer(request):
    row = int(re.search(rb"\\d+", bytes(request.prompt_token_ids))[0])
    if row % 23 == 7:
        raise RuntimeError("the script failed")
    text = "<b>Wetter</b> soils raise nitrogen uptake until saturation, then it falls"
    return [*text_tokens(text[: 20 + row * 7 % 50]), EOS]

backend = fake_backend(step_s=0.01, script=answer)
config = EngineConfig(scheduler_config=SchedulerConfig(completion_batch_size=8))
default_session().adopt("fake", "fake", AsyncEngineCore.over(EngineCore(None, None, config, backend=backend)))
abstracts = [f"{i}: We study the effect of <i>soil moisture</i> on nitrogen uptake" for i in range(400)]
df = pd.DataFrame({"abstract": [None if i % 17 == 3 else text for i, text in enumerate(abstracts)]})
"""
SYNC = "first = df.mlx.generate('Summarise in one sentence: {{ abstract }}', raw=True)"
MAGIC = "%%mlx_batch df -o second --raw\nSummarise in one sentence: {{ abstract }}"
COUNTS = "counts = {}.state.value_counts(); print({{name: int(counts[name]) for name in counts.index}})"
PRESS = """async (view, [name, state]) => {
  const button = view.querySelector(`[data-do='${name}']`);
  const start = performance.now();
  const seconds = () => (performance.now() - start) / 1000;
  button.click();
  while (view.dataset.state !== state && seconds() < 3) await new Promise((go) => setTimeout(go, 5));
  return seconds();
}"""
COUNT_UPDATES = """() => {
  window.updates = 0;
  window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.iopubMessage.connect((_, message) => {
    if (message.header.msg_type === "comm_msg") window.updates += 1;
  });
}"""
STICKING_OUT = """view => {
  const right = view.getBoundingClientRect().right;
  return [...view.querySelectorAll(":not(thead *)")]
    .filter((part) => part.getClientRects().length && part.getBoundingClientRect().right > right + 0.5)
    .map((part) => part.outerHTML);
}"""


def handled(view: "Locator") -> int:
    return int(view.locator(".rows b").first.inner_text().replace(",", ""))


def press(view: "Locator", button: str, state: str) -> float:
    """Press a button of a view; return how many seconds it took until the view said what came of it."""
    seconds: float = view.evaluate(PRESS, [button, state])
    return seconds


@pytest.mark.parametrize(("name", "cell", "result"), [("sync", SYNC, "first"), ("awaited", MAGIC, "second")])
def test_a_job_is_watched_paused_resumed_and_stopped(lab: "Lab", name: str, cell: str, result: str) -> None:
    with lab.notebook(f"batch_{name}", [START, cell, COUNTS.format(result)]) as notebook:
        notebook.run(0)
        notebook.run(1, wait=False)
        view = notebook.page.locator(".batch")
        view.wait_for(timeout=10_000)
        seen = set()
        for _ in range(8):
            seen.add(handled(view))
            notebook.page.wait_for_timeout(250)
        assert len(seen) >= 4, seen

        assert press(view, "pause", "paused") < 0.3
        notebook.page.wait_for_timeout(1500)  # for the rows that are with the engine
        before = handled(view)
        notebook.page.wait_for_timeout(700)
        assert handled(view) == before
        assert notebook.is_busy(1)
        notebook.picture(f"batch_{name}_paused", view)
        assert press(view, "pause", "running") < 0.3
        notebook.page.wait_for_timeout(1000)
        assert handled(view) > before

        view.locator("[data-do='stop']").click()
        assert press(view, "stop", "stopped") < 0.3
        notebook.wait_done(1, seconds=3)
        notebook.run(2)
        counted = notebook.cell(2).locator(".jp-OutputArea").inner_text()
        assert int(re.search(r"'aborted': (\d+)", counted)[1]) == 400 - handled(view)  # type: ignore[index]
        notebook.picture(f"batch_{name}_stopped", view)


def test_views_agree_and_a_reopened_notebook_shows_the_line(lab: "Lab") -> None:
    short = "shown = df.head(60).mlx.generate('{{ abstract }}', raw=True)"
    with lab.notebook(
        "batch_two", [START, short, "tiny = df.iloc[[3, 20]].mlx.generate('{{ abstract }}', raw=True)"]
    ) as notebook:
        notebook.run(0)
        notebook.run(1, wait=False)
        views = notebook.page.locator(".batch")
        views.wait_for(timeout=10_000)
        notebook.command("notebook:create-output-view")
        views.nth(1).wait_for(timeout=10_000)
        notebook.wait_done(1)
        notebook.page.wait_for_timeout(300)
        assert views.nth(0).inner_text() == views.nth(1).inner_text()
        assert views.nth(0).get_attribute("data-state") == "finished"
        assert handled(views.nth(0)) == 60
        notebook.page.set_viewport_size({"width": 2000, "height": 900})
        notebook.page.wait_for_timeout(300)
        notebook.picture("batch_two_views")
        notebook.command("application:close")  # the second view, which has a tab of its own
        notebook.run(2)
        assert views.count() == 1, "a short job leaves a line"
        saved = notebook.save()
    line = "60 rows · 53 done · 3 failed · 4 skipped · "
    assert saved.cells[1].outputs[0].data["text/plain"].startswith(line)
    with lab.open("batch_reopened", saved, kernel=False) as notebook:
        first, second = notebook.cell(1), notebook.cell(2)
        first.locator(".mlx-nb-batch-snapshot").wait_for(timeout=20_000)
        assert line in first.inner_text()
        assert "2 rows · 0 done · 2 skipped · 0.0 s" in second.inner_text()
        assert notebook.page.locator(".jupyter-widgets:visible").count() == 0
        notebook.picture("batch_snapshot", first)


def test_ten_thousand_rows_leave_the_page_as_it_was(lab: "Lab") -> None:
    cells = [
        START.replace("step_s=0.01", "step_s=0"),
        "many = pd.Series([f'row {i}' for i in range(10_000)])",
        "answers = many.mlx.generate(raw=True, max_tokens=8)",
    ]
    with lab.notebook("batch_many", cells) as notebook:
        notebook.run(0)
        notebook.run(1)
        page = notebook.page
        page.evaluate(COUNT_UPDATES)
        devtools = page.context.new_cdp_session(page)

        def heap() -> int:
            devtools.send("HeapProfiler.collectGarbage")
            return int(devtools.send("Runtime.getHeapUsage")["usedSize"])

        notebook.run(2, wait=False)
        view = page.locator(".batch")
        view.wait_for(timeout=10_000)
        before, start = heap(), time.monotonic()
        notebook.wait_done(2, seconds=60)
        seconds = time.monotonic() - start
        page.wait_for_timeout(300)
        assert handled(view) == 10_000
        assert heap() - before < 2_000_000
        assert page.locator(".batch *").count() < 250
        updates = page.evaluate("window.updates")
        assert 3 <= updates <= 5 * seconds + 5, (updates, seconds)


STILL = """\
from dataclasses import replace
from mlx_nb.frames.snapshot import Recent, Snapshot
from mlx_nb.widgets.batch import About, BatchWidget

rows = [Recent(*row) for row in (
    ("841", "In one line: We study the effect of soil moisture on uptake", "Wetter soils raise uptake", "stop"),
    ("840", "In one line: This paper introduces a method for aligning", "A robust alignment " * 9, "length"),
    ("838", "In one line: Background: hospital readmission remains", "the JSON is cut off", "error"),
    ("839", "", "'abstract' is null", "skipped"),
    ("('2024', 'b')", "In one line: <b>Using</b> a panel of 214 towns", "Transit subsidies help", "stop"),
    ("836", "In one line: Les auteurs examinent la transmission", "Les contes changent peu", "stop"),
)]

class Job:
    now = Snapshot("running", 1200, 842, 7, 23, 3, 300, 8, 4.2, 486.0, 200.0, 85.0, tuple(rows))
    def snapshot(self): return self.now
    def pause(self): self.turn("paused")
    def resume(self): self.turn("running")
    def stop(self): self.turn("stopped")
    def turn(self, state, **more): self.now = replace(self.now, state=state, **more)

job, why = Job(), [None]
widget = BatchWidget(job, About("Summarise: {{ abstract }}", lambda: why[0], "%mlx_engine restart"))
widget
"""
FINISH = """\
job.turn("finished", done=1200, failed=12, skipped=31, running=0, elapsed_s=286.3, left_s=0.0)
widget.end()
"""
FAILED = "why[0] = 'Metal ran out of memory while it prefilled 8 rows of 4,096 tokens.'"


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_a_job_keeps_its_height_and_fits_every_width(lab: "Lab", theme: str) -> None:
    from axe import axe_violations

    with lab.notebook(
        f"batch_{theme}", [STILL, "job.pause()", "job.resume(); " + FAILED, "why[0] = None", FINISH]
    ) as notebook:
        notebook.command("apputils:change-theme", theme=f"JupyterLab {theme}")
        notebook.run(0)
        view = notebook.page.locator(".batch")
        heights: dict[str, set[float]] = {"wide": set(), "medium": set(), "narrow": set()}
        for index, state in enumerate(("running", "paused", "error", "running", "finished")):
            if index:
                notebook.run(index)
            notebook.page.wait_for_selector(f".batch[data-state='{state}']")
            for width, name in ((1280, "wide"), (960, "medium"), (540, "narrow")):
                notebook.page.set_viewport_size({"width": width, "height": 900})
                notebook.page.wait_for_timeout(300)
                notebook.picture(f"batch_{theme.lower()}_{name}_{state}", view)
                box = view.bounding_box()
                assert box is not None
                heights[name].add(box["height"])
                assert view.evaluate(STICKING_OUT) == [], name
                assert axe_violations(notebook.page, ".batch") == [], (name, state)
        assert [len(each) for each in heights.values()] == [1, 1, 1], heights
