"""The chat panel as a person meets it: in JupyterLab, while cells run."""

import time
from typing import TYPE_CHECKING

import pytest
from axe import axe_violations

if TYPE_CHECKING:
    from lab import Lab, Notebook
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(240)]

START = '''\
%load_ext mlx_nb
import time
from mlx_nb import AsyncEngineCore, ChatPanel, EngineConfig, EngineCore
from mlx_nb.backends.fake import EOS, fake_backend, text_tokens
from mlx_nb.session.session import default_session

WINDOW = """<think>A centred window leaves missing values at both ends. The option min_periods keeps them.</think>\
Use a **centred window** and let it shrink at the ends:

```python
smooth = (
    df["load"]
    .rolling(9, center=True, min_periods=1)
    .median()  # shorter windows at the ends
)
```

- `center=True` keeps peaks where they are.
- `min_periods=1` avoids [missing values](https://example.org/), not [this](javascript:alert(1)).

| Window | Error |
|:-------|------:|
| 5      |  0.12 |
| 9      |  0.31 |
"""
HOSTILE = "<img src=x onerror='document.title=1'><script>document.title=1</script>"

def answer(request):
    question = bytes(request.prompt_token_ids).decode().rsplit("user: ", 1)[1]
    if "window" in question:
        return [*text_tokens(WINDOW), EOS]
    if "hostile" in question:
        return [*text_tokens(HOSTILE), EOS]
    if "slowly" in question:
        return text_tokens("and on " * 2000)
    return [*text_tokens(f"You asked: {question.splitlines()[0]}"), EOS]

backend = fake_backend(step_s=0.002, script=answer)
core = EngineCore(None, None, EngineConfig(model_name="Qwen3-VL-8B-Instruct"), backend=backend)
default_session().adopt("default", "demo", AsyncEngineCore.over(core))
panel = ChatPanel(system="You are a concise data analysis assistant.")
panel
'''
BUSY = "end = time.time() + {0}\nwhile time.time() < end:\n    time.sleep(0.01)\nprint(len(panel.messages))"
AWAITED = "import asyncio\nawait asyncio.sleep({0})\nprint(len(panel.messages))"
STICKING_OUT = """chat => {
  const right = chat.getBoundingClientRect().right;
  return [...chat.querySelectorAll(":not(.table *):not(pre *):not(.sr)")]
    .filter((part) => part.getClientRects().length && part.getBoundingClientRect().right > right + 0.5)
    .map((part) => part.outerHTML.slice(0, 200));
}"""


def start(notebook: "Notebook") -> "Locator":
    notebook.run(0)
    chat = notebook.page.locator(".mlx.chat").first
    chat.wait_for()
    return chat


def write(chat: "Locator", text: str) -> None:
    field = chat.get_by_label("Message", exact=True)
    field.fill(text)
    field.press("Enter")


def wait_answer(chat: "Locator", text: str) -> None:
    """Until the newest answer holds the text, and none is being written."""
    chat.page.wait_for_function(
        """([chat, text]) => {
          const newest = [...chat.querySelectorAll(".answer")].at(-1);
          return chat.dataset.state === "idle" && newest?.textContent.includes(text);
        }""",
        arg=[chat.element_handle(), text],
        timeout=20_000,
    )


@pytest.mark.parametrize("cell", [BUSY, AWAITED], ids=["busy", "awaited"])
def test_two_turns_while_a_cell_runs(lab: "Lab", cell: str) -> None:
    with lab.notebook(f"turns_{cell is BUSY}", [START, cell.format(6)]) as notebook:
        chat = start(notebook)
        notebook.run(1, wait=False)
        notebook.page.wait_for_timeout(300)
        write(chat, "one")
        wait_answer(chat, "You asked: one")
        write(chat, "go slowly")
        answer = chat.locator(".turn").nth(1).locator(".answer")
        answer.get_by_text("and on and on").wait_for(timeout=3000)
        before = len(answer.inner_text())
        notebook.page.wait_for_timeout(500)
        assert len(answer.inner_text()) > before
        assert notebook.is_busy(1)

        pressed = time.monotonic()
        chat.locator("[data-do='stop']").click()
        notebook.page.wait_for_selector(".mlx.chat[data-state='idle']", timeout=3000)
        assert time.monotonic() - pressed < 0.5, "with the browser driver's own share"
        assert notebook.is_busy(1)
        assert chat.locator(".remark").last.inner_text() == "Stopped."
        length = len(answer.inner_text())
        notebook.page.wait_for_timeout(300)
        assert len(answer.inner_text()) == length

        notebook.wait_done(1, seconds=15)
        assert notebook.cell(1).locator(".jp-OutputArea").inner_text().strip() == "5"


def test_a_conversation_from_its_first_question_to_a_new_cell(lab: "Lab") -> None:
    cells = [
        START,
        "panel",
        "core.stop_now()",
        "core.launch(); core.wait_ready(); print('up')",
        "print(messages)",
    ]
    with lab.notebook("conversation", cells) as notebook:
        page = notebook.page
        chat = start(notebook)
        write(chat, "hostile")
        wait_answer(chat, "onerror")
        assert chat.locator(".answer img, .answer script").count() == 0

        chat.locator("[data-do='edit']").click()
        editor = chat.get_by_label("Edit the question")
        assert editor.input_value() == "hostile"
        editor.fill("How wide a window?")
        notebook.picture("chat_editing", chat)
        editor.press("Enter")
        wait_answer(chat, "missing values")
        assert chat.locator(".turn").count() == 1
        assert [link.get_attribute("href") for link in chat.locator(".answer a").all()] == [
            "https://example.org/"
        ]
        assert not chat.get_by_text("A centred window leaves").is_visible()
        chat.locator("summary").click()
        assert chat.get_by_text("A centred window leaves").is_visible()

        chat.locator("[data-do='regenerate']").last.click()
        page.wait_for_selector(".mlx.chat[data-state='running']", timeout=3000)
        wait_answer(chat, "0.31")
        assert chat.locator(".turn").count() == 1

        chat.locator("[data-do='settings']").click()
        temperature = chat.locator("[name='temperature']")
        temperature.fill("hot")
        temperature.press("Tab")
        chat.get_by_text("temperature must be a finite number, got 'hot'").wait_for(timeout=3000)
        notebook.picture("chat_drawer", chat)
        chat.locator("[name='max_tokens']").fill("5")
        chat.locator("[name='max_tokens']").press("Tab")

        notebook.run(1)
        second = page.locator(".mlx.chat").nth(1)
        second.locator(".turn").wait_for()
        write(second, "two")
        wait_answer(second, "You a")
        wait_answer(chat, "You a")
        assert "Cut off at max tokens" in chat.locator(".turn").nth(1).inner_text()
        for part in (".question", ".answer", ".remark", ".figures dd"):
            assert second.locator(part).all_inner_texts() == chat.locator(part).all_inner_texts()
        assert second.locator("[name='max_tokens']").input_value() == "5"

        notebook.run(2)
        page.locator(".mlx.chat[data-state='stopped']").nth(1).wait_for(timeout=3000)
        write(chat, "three")
        problem = chat.locator(".turn").last.locator(".problem")
        problem.wait_for()
        assert "no engine was running" in problem.inner_text()
        assert "%mlx_engine restart default" in chat.locator(".notice").inner_text()
        notebook.picture("chat_stopped_engine", chat)
        assert axe_violations(page, ".mlx.chat") == []
        notebook.run(3)
        problem.locator("[data-do='retry']").click()
        wait_answer(chat, "You a")
        assert chat.locator(".notice").is_hidden()

        chat.locator("[data-do='to-cell']").click()
        added = notebook.cell(1)
        added.get_by_text("messages = [").wait_for(timeout=3000)
        notebook.run(1)
        notebook.run(5)
        shown = notebook.cell(5).locator(".jp-OutputArea").inner_text()
        assert "'content': 'How wide a window?'" in shown
        assert page.title() != "1"


def test_a_notebook_opened_without_its_kernel_shows_the_conversation(lab: "Lab") -> None:
    with lab.notebook("saved_chat", [START, "panel.close()"]) as notebook:
        chat = start(notebook)
        write(chat, "hostile")
        wait_answer(chat, "onerror")
        write(chat, "How wide a window?")
        wait_answer(chat, "0.31")
        notebook.run(1)
        notebook.page.wait_for_selector(".mlx.chat", state="detached")
        saved = notebook.save()
    with lab.open("reopened_chat", saved, kernel=False) as notebook:
        snapshot = notebook.page.locator(".mlx-nb-chat-snapshot")
        snapshot.wait_for(timeout=20_000)
        shown = snapshot.inner_text()
        assert "How wide a window?" in shown
        assert "<script>document.title=1</script>" in shown
        assert snapshot.locator("pre code").inner_text().startswith("smooth = (")
        assert snapshot.locator("img, script").count() == 0
        notebook.picture("chat_snapshot", snapshot)


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_the_panel_fits_every_width_and_everybody_can_use_it(lab: "Lab", theme: str) -> None:
    with lab.notebook(f"chat_look_{theme}", [START]) as notebook:
        page = notebook.page
        notebook.command("apputils:change-theme", theme=f"JupyterLab {theme}")
        chat = start(notebook)
        page.wait_for_timeout(1000)
        notebook.picture(f"chat_{theme.lower()}_empty", chat)
        assert axe_violations(page, ".mlx.chat") == []
        write(chat, "How wide a window?")
        chat.locator("pre code").wait_for()
        page.wait_for_timeout(300)
        notebook.picture(f"chat_{theme.lower()}_streaming", chat)
        wait_answer(chat, "0.31")
        chat.locator("[data-do='settings']").click()
        for width, name in ((1280, "wide"), (960, "medium"), (600, "narrow")):
            page.set_viewport_size({"width": width, "height": 1100})
            page.wait_for_timeout(400)
            notebook.picture(f"chat_{theme.lower()}_{name}", chat)
            assert chat.evaluate(STICKING_OUT) == [], name
            assert axe_violations(page, ".mlx.chat") == [], name
