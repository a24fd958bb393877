"""A cluster's workers and a job on them as a person sees both, in JupyterLab."""

from typing import TYPE_CHECKING

import pytest
from models import tiny_folder

if TYPE_CHECKING:
    from lab import Lab

pytest.importorskip("distributed")
pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

START = """\
%load_ext mlx_nb
import mlx_nb, pandas as pd
from distributed import Client, LocalCluster

cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
client = Client(cluster)
mlx_nb.start_workers(client, FOLDER)
"""
JOB = """\
frame = pd.DataFrame({"word": [f"word {i}" for i in range(4000)]})
result = mlx_nb.generate_frame(
    frame, "Say {{ word }}", client=client, max_tokens=200, ignore_eos=True, partitions=6
)
print(len(result), result["state"].value_counts().to_dict())
"""


def test_a_job_moves_in_both_views_and_stops(lab: "Lab") -> None:
    from axe import axe_violations

    start = START.replace("FOLDER", repr(str(tiny_folder())))
    with lab.notebook("workers", [start, JOB, "cluster.close()"]) as notebook:
        notebook.run(0, seconds=120)
        monitor = notebook.page.locator(".monitor")
        monitor.wait_for(timeout=20_000)
        assert monitor.locator("thead th").first.inner_text() == "Worker"
        rows = monitor.locator("tbody tr")
        assert rows.count() == 2
        assert "Idle" in rows.nth(0).inner_text()
        notebook.run(1, wait=False)
        view = notebook.page.locator(".batch")
        view.wait_for(timeout=30_000)
        notebook.page.wait_for_function(
            "[...document.querySelectorAll('.monitor tbody tr')].every((row) => row.innerText.includes('Running'))",
            timeout=30_000,
        )
        notebook.page.wait_for_function(
            "document.querySelector('.batch .rows b').innerText !== '0'", timeout=60_000
        )
        for theme in ("Light", "Dark"):
            notebook.command("apputils:change-theme", theme=f"JupyterLab {theme}")
            notebook.page.wait_for_timeout(1500)
            notebook.picture(f"workers_{theme.lower()}", monitor)
            notebook.picture(f"workers_job_{theme.lower()}", view)
        for width in (960, 600):
            notebook.page.set_viewport_size({"width": width, "height": 900})
            notebook.page.wait_for_timeout(400)
            notebook.picture(f"workers_{width}", monitor)
        assert axe_violations(notebook.page, ".monitor") == []
        view.locator("[data-do='stop']").click()
        view.locator("[data-do='stop']").click()
        notebook.wait_done(1, seconds=60)
        assert "'aborted':" in notebook.cell(1).inner_text()
        notebook.run(2, seconds=60)
