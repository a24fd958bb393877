"""A DataFrame job as a person meets it: in JupyterLab, while its cell runs and after."""

import re
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lab import Lab, Notebook
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(180)]

START = """\
%load_ext mlx_nb
import pandas as pd
from mlx_nb import AsyncEngineCore, EngineConfig, EngineCore, SchedulerConfig
from mlx_nb.backends.fake import EOS, fake_backend, text_tokens
from mlx_nb.session.session import default_session

def answer(request):
    row = int(bytes(request.prompt_token_ids).decode().split(":")[1])
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
STICKING_OUT = """view => {
  const right = view.getBoundingClientRect().right;
  return [...view.querySelectorAll(":not(thead *)")]
    .filter((part) => part.getClientRects().length && part.getBoundingClientRect().right > right + 0.5)
    .map((part) => part.outerHTML);
}"""


def handled(view: "Locator") -> int:
    return int(view.locator(".rows b").first.inner_text().replace(",", ""))


def in_state(notebook: "Notebook", state: str, timeout: int = 3000) -> float:
    """Return how many seconds it took until a view was in that state."""
    start = time.monotonic()
    notebook.page.locator(f".batch[data-state='{state}']").first.wait_for(timeout=timeout)
    return time.monotonic() - start


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

        view.locator("[data-do='pause']").click()
        assert in_state(notebook, "paused") < 0.3
        notebook.page.wait_for_timeout(1500)  # for the rows that are with the engine
        before = handled(view)
        notebook.page.wait_for_timeout(700)
        assert handled(view) == before
        assert notebook.is_busy(1)
        notebook.picture(f"batch_{name}_paused", view)
        view.locator("[data-do='pause']").click()
        assert in_state(notebook, "running") < 0.3
        notebook.page.wait_for_timeout(1000)
        assert handled(view) > before

        view.locator("[data-do='stop']").click()
        view.locator("[data-do='stop']").click()
        assert in_state(notebook, "stopped") < 0.3
        notebook.wait_done(1, seconds=3)
        notebook.run(2)
        counted = notebook.cell(2).locator(".jp-OutputArea").inner_text()
        assert int(re.search(r"'aborted': (\d+)", counted)[1]) == 400 - handled(view)  # type: ignore[index]
        notebook.picture(f"batch_{name}_stopped", view)
