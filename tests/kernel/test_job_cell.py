"""Where a DataFrame job shows itself: in its own cell, whatever runs meanwhile."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kernel_session import KernelSession

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

FRAME = "import pandas\nframe = pandas.DataFrame({'text': ['abc', 'xyz']})"
VIEW = "application/vnd.jupyter.widget-view+json"
LONG = "'{{ text }}', raw=True, max_tokens=100"


@pytest.mark.parametrize(
    "code",
    [
        f"result = frame.mlx.generate({LONG})",
        f"result = await frame.mlx.agenerate({LONG})",
        "%%mlx_batch frame -o result --raw -n 100\n{{ text }}",
        "%%time\nget_ipython().run_cell_magic('mlx_batch', 'frame -o result --raw -n 100', '{{ text }}')",
    ],
    ids=["blocking", "awaited", "magic", "blocking magic"],
)
def test_a_job_leaves_its_line_and_its_view(kernel: "KernelSession", code: str) -> None:
    kernel.run(FRAME)
    cell = kernel.run(code)

    line, _ = cell.texts
    assert line.startswith("2 rows · 2 done · ")
    assert VIEW in cell.displays[1]
    assert cell.stderr == ""


def test_the_view_of_a_job_in_the_background_comes_into_the_cell_that_began_it(
    kernel: "KernelSession",
) -> None:
    kernel.run(FRAME)
    began = kernel.run(f"task = asyncio.create_task(frame.mlx.agenerate({LONG}))")
    assert began.displays == []
    waited = kernel.run("await task; print('waited')")

    assert waited.stdout == "waited\n"
    assert waited.displays == []
    assert began.texts[0].startswith("2 rows · 2 done · ")


def test_a_job_can_be_told_to_show_a_bar(kernel: "KernelSession") -> None:
    kernel.run(FRAME)
    cell = kernel.run(f"result = frame.mlx.generate({LONG}, progress='bar')")

    assert cell.displays == []
    assert "2/2" in cell.stderr
