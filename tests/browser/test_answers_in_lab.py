"""Answers as a person meets them in JupyterLab: streamed, folded, laid out, and never run in the page."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lab import Lab, Notebook
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(180)]

HOSTILE = (
    '<h1>owned</h1><img src=x onerror=\'document.title="owned"\'><script>document.title="owned"</script>'
)
START = f"""\
%load_ext mlx_nb
from mlx_nb import AsyncEngineCore, EngineCore
from mlx_nb.backends.fake import EOS, fake_backend, text_tokens
from mlx_nb.session.session import default_session

HOSTILE = {HOSTILE!r}

def adopt(name, text, step_s=0.002):
    backend = fake_backend(step_s=step_s, script=lambda request: [*text_tokens(text), EOS])
    default_session().adopt(name, "fake", AsyncEngineCore.over(EngineCore(None, None, backend=backend)))

adopt("hostile", HOSTILE + "`" + HOSTILE + "`\\n\\n```html\\n" + HOSTILE + "\\n```")
adopt("hidden", "<think>" + HOSTILE + "</think>" + HOSTILE)
adopt("json", '{{"name": "<b>Tokyo</b>", "country": "Japan"}}')
adopt("thinking", "<think>One and one, so two, I think.</think>It is **two**.")
adopt("streaming", "Some *words* and `code`, " * 12, step_s=0.01)
"""
CELLS = {
    "start": START,
    "stream": "%mlx_generate -n 240 hi",
    "thinking": "%mlx_generate -e thinking hi",
    "json": "%mlx_generate -e json -f json hi",
    "chat": "%%mlx_chat paris -e thinking\nWhich river?",
    "show": "%mlx_chat paris --show",
    "background": "%mlx_generate --bg -n 240 -o handle hi",
    "handle": "handle",
    "waited": "answer = handle.result(20)\nanswer",
    "option": "%mlx_generate --temprature 0 hi",
    "engine": "%mlx_generate -e nowhere hi",
    "late": "%mlx_generate --timeout 0.2 hi",
    "hostile": "%mlx_generate -e hostile {{ HOSTILE }}",
    "hidden": "%mlx_generate -e hidden {{ HOSTILE }}",
    "asked": "%%mlx_chat asked -e hostile --show\n{{ HOSTILE }}",
    "page": "%mlx_generate -e hostile -f html hi",
}
AT = {name: index for index, name in enumerate(CELLS)}
ERRORS = {
    "option": "UsageError: unknown option --temprature: did you mean --temperature?",
    "engine": "UsageError: there is no engine 'nowhere' (running: hidden, hostile, json, streaming, thinking)",
    "late": "UsageError: the request was not finished within 0.2 s",
}


@pytest.fixture(scope="module")
def notebook(lab: "Lab") -> "Iterator[Notebook]":
    with lab.notebook("answers", list(CELLS.values())) as opened:
        opened.run(AT["start"])
        yield opened


def output(notebook: "Notebook", name: str) -> "Locator":
    return notebook.cell(AT[name]).locator(".jp-Cell-outputArea")


def run(notebook: "Notebook", name: str) -> "Locator":
    notebook.run(AT[name])
    shown = output(notebook, name)
    shown.scroll_into_view_if_needed()
    return shown


def test_answers_of_every_kind(notebook: "Notebook") -> None:
    notebook.run(AT["stream"], wait=False)
    live = output(notebook, "stream")
    live.locator("em").first.wait_for(timeout=5000)
    before = len(live.inner_text())
    notebook.page.wait_for_timeout(500)
    assert notebook.is_busy(AT["stream"])
    assert len(live.inner_text()) > before
    notebook.wait_done(AT["stream"])
    assert live.locator("em").count() > 5
    assert re.search(r"240 tokens · [\d.]+ tokens/s · first token after .* · length", live.inner_text())

    for name in ("thinking", "chat"):
        thinking = run(notebook, name)
        thought = thinking.get_by_text("One and one, so two, I think.")
        assert thinking.locator("strong").inner_text() == "two"
        assert not thought.is_visible()
        thinking.locator("summary").click()
        assert thought.is_visible()
    assert run(notebook, "show").locator("strong").all_inner_texts() == ["user", "assistant", "two"]

    code = run(notebook, "json").locator("pre code")
    assert code.inner_text().strip() == '{\n  "name": "<b>Tokyo</b>",\n  "country": "Japan"\n}'
    notebook.picture("answers")


def test_an_answer_in_the_background_goes_on_in_its_cell(notebook: "Notebook") -> None:
    begun = run(notebook, "background")
    assert "in the background" in begun.inner_text()
    assert "answer in the background: running" in run(notebook, "handle").inner_text()
    before = len(begun.inner_text())

    waited = run(notebook, "waited")

    assert len(begun.inner_text()) > before
    assert "240 tokens · " in begun.inner_text()
    assert waited.locator("em").count() > 5


def test_errors_are_one_line(notebook: "Notebook") -> None:
    for name, message in ERRORS.items():
        shown = run(notebook, name).locator("[data-mime-type='application/vnd.jupyter.stderr']")
        assert shown.inner_text().strip() == message
    assert "interrupted" not in output(notebook, "late").inner_text()
    notebook.picture("errors")


def test_html_of_a_prompt_or_an_answer_is_text(notebook: "Notebook") -> None:
    for name in ("hostile", "hidden", "asked"):
        shown = run(notebook, name)
        for summary in shown.locator("summary").all():
            summary.click()
        assert HOSTILE in shown.inner_text()
        assert shown.locator("h1, img, script, iframe").count() == 0
    frame = run(notebook, "page").locator("iframe")
    assert frame.get_attribute("sandbox") == ""
    notebook.page.wait_for_timeout(300)
    assert notebook.page.title() != "owned"
    notebook.picture("hostile")
