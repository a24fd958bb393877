"""The token view as a person meets it: in JupyterLab, while an answer comes and afterwards."""

from typing import TYPE_CHECKING

import pytest
from axe import axe_violations

if TYPE_CHECKING:
    from lab import Lab, Notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

START = """\
%load_ext mlx_nb
from word_engine import adopt_words
adopt_words("long", repeat=20, step_s=0.002)
adopt_words("slow", repeat=3, step_s=0.03)
adopt_words("default", step_s=0.03);
"""
VIEW = ".mlx.tokens"
STICKING_OUT = """view => {
  const right = view.getBoundingClientRect().right;
  return [...view.querySelectorAll(":not(.card, .card *)")]
    .filter((part) => part.getClientRects().length && part.getBoundingClientRect().right > right + 0.5)
    .map((part) => part.outerHTML);
}"""


def count(notebook: "Notebook", cell: int) -> int:
    text = notebook.cell(cell).locator(f"{VIEW} .head dd").first.text_content() or "0"
    return int(text.replace(",", ""))


@pytest.mark.parametrize(
    "cell",
    ["%%mlx_generate --logprobs 5 -e slow\nTides?", "%%time\n%mlx_generate --logprobs 5 -e slow Tides?"],
)
def test_tokens_stream_in_awaited_and_in_busy_cells(lab: "Lab", cell: str) -> None:
    name = "tokens_awaited" if cell.startswith("%%mlx") else "tokens_busy"
    with lab.notebook(name, [START, cell, "len(_)"]) as notebook:
        notebook.run(0)
        notebook.run(1, wait=False)
        notebook.cell(1).locator(f"{VIEW} [data-i='3']").wait_for(timeout=10_000)
        seen = set()
        for _ in range(10):
            seen.add(count(notebook, 1))
            notebook.page.wait_for_timeout(200)
        assert notebook.is_busy(1)
        assert len(seen) >= 4, seen
        notebook.wait_done(1)
        notebook.page.wait_for_selector(f"{VIEW}[data-state='finished']")
        assert count(notebook, 1) == 3 * 67


def test_hover_keys_and_pin(lab: "Lab") -> None:
    with lab.notebook(
        "tokens_keys", [START, "%mlx_generate --logprobs 5 -o answer Tides?", "answer.tokens_view()"]
    ) as notebook:
        notebook.run(0)
        notebook.run(1)
        page, view = notebook.page, notebook.cell(1).locator(VIEW)
        view.wait_for()
        page.wait_for_selector(f"{VIEW}[data-state='finished']")
        head, text = view.locator(".card header"), view.locator(".text")
        said = text.inner_text()
        assert "alert(1)" in said
        assert view.locator("img").count() == 0
        view.locator("b", has_text="breathing").hover()
        assert "·breathing" in head.inner_text()
        assert "8.0 %" in head.inner_text()
        text.focus()
        page.keyboard.press("Home")
        assert "1 of 67" in head.inner_text()
        for key, place in (
            ("ArrowRight", "2 of"),
            ("End", "67 of"),
            ("ArrowUp", "of 67"),
            ("Home", "1 of"),
            ("n", "of 67"),
        ):
            page.keyboard.press(key)
            assert place in head.inner_text(), key
        assert "slow" in head.inner_text()
        page.keyboard.press("Enter")
        view.locator("b", has_text="Moon").hover()
        assert "slow" in head.inner_text()
        page.keyboard.press("Escape")
        view.locator("b", has_text="Tides").hover()
        view.locator("b", has_text="Moon").hover()
        assert "Moon" in head.inner_text()
        assert notebook.cell(1).locator(".jp-InputArea").count() == 1  # none of the keys reached the notebook
        assert axe_violations(page, VIEW) == []
        notebook.run(2)
        notebook.cell(2).locator(".text").scroll_into_view_if_needed()
        notebook.cell(2).locator(f"{VIEW} [data-i='66']").wait_for()
        assert notebook.cell(2).locator(".text").inner_text() == said


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_it_fits_every_width(lab: "Lab", theme: str) -> None:
    with lab.notebook(f"tokens_{theme}", [START, "%mlx_generate --logprobs 5 Tides?"]) as notebook:
        notebook.command("apputils:change-theme", theme=f"JupyterLab {theme}")
        notebook.run(0)
        notebook.run(1)
        page, view = notebook.page, notebook.cell(1).locator(VIEW)
        page.wait_for_selector(f"{VIEW}[data-state='finished']")
        view.locator(".text").focus()
        for width, name in ((1280, "wide"), (960, "medium"), (600, "narrow")):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(300)
            page.keyboard.press("n")
            page.wait_for_timeout(200)
            notebook.picture(f"tokens_{theme.lower()}_{name}")
            assert view.evaluate(STICKING_OUT) == [], name
            assert view.locator(".card").is_visible()
            assert axe_violations(page, VIEW) == [], name


def test_a_long_answer_draws_what_can_be_seen_and_a_reopened_one_its_snapshot(lab: "Lab") -> None:
    short, long = "%mlx_generate --logprobs 5 Tides?", "%mlx_generate --logprobs 5 -n 2000 -e long Tides?"
    with lab.notebook("tokens_long", [START, short, long]) as notebook:
        notebook.run(0)
        notebook.run(1)
        notebook.run(2, seconds=60)
        notebook.cell(2).locator(f"{VIEW}[data-state='finished']").wait_for()
        notebook.page.wait_for_timeout(500)
        view = notebook.cell(2).locator(VIEW)
        assert count(notebook, 2) == 67 * 20
        assert view.locator("[data-i]").count() < 67 * 12
        assert "mean of each 3" in view.locator("figcaption").inner_text()
        notebook.picture("tokens_long", view)
        saved = notebook.save()
    assert "breathing of the sea" in saved.cells[1].outputs[0]["data"]["text/plain"]
    with lab.open("tokens_reopened", saved, kernel=False) as notebook:
        snapshot = notebook.cell(1).locator(".mlx-nb-tokens-snapshot")
        snapshot.wait_for(timeout=20_000)
        assert "Tides are the slow breathing of the sea" in snapshot.inner_text()
        assert "alert(1)" in snapshot.inner_text()
        notebook.picture("tokens_snapshot", notebook.cell(1))
