"""Every magic with a real server behind the engine."""

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("openai")

if TYPE_CHECKING:
    from kernel_session import KernelSession
    from mlx_server import MlxServer

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

VIEW = "application/vnd.jupyter.widget-view+json"
FRAME = "import pandas, mlx_nb\nframe = pandas.DataFrame({'text': ['abc', 'xyz', 'abc']})"


@pytest.fixture(scope="module")
def cells(kernel: "KernelSession", mlx_server: "MlxServer") -> "Iterator[KernelSession]":
    """The kernel, with the server's engine as the current one."""
    cell = kernel.run(f"%mlx_engine connect {mlx_server.url} --name server --concurrency 4", 60)
    assert cell.status == "ok", cell
    assert cell.texts[-1].endswith(f"called 'server': {mlx_server.url}/v1 (mlx-lm)")
    kernel.run(FRAME)
    yield kernel
    kernel.run("%mlx_engine stop server")


def test_a_prompt_streams_into_its_cell(cells: "KernelSession") -> None:
    cell = cells.run("%%mlx_generate -n 12 -t 0 -o answer\nWhat is a sphinx?")

    assert cell.status == "ok", cell
    assert cells.ask("(answer.output.completion_tokens, answer.output.finish_reason)") == (12, "length")
    assert cells.ask("answer.text.strip() != ''") is True
    assert "12 tokens" in cell.texts[-1]


@pytest.mark.parametrize(
    "code",
    [
        "%mlx_generate -n 5 -t 0 -o answer Hello",
        "%%mlx_generate -n 5 -t 0 -o answer --raw\nOnce upon a time",
        "%%mlx_generate -n 5 -o answer --system 'Be brief.' --seed 3 --top-k 5 --min-p 0.1 --stop zz\nHello",
        "answer = await mlx_nb.agenerate('Hello', max_tokens=5)",
        "answer = mlx_nb.generate('Hello', max_tokens=5)",
        "%%time\n%mlx_generate -n 5 -t 0 -o answer Hello",
    ],
)
def test_a_question_is_answered_however_it_is_asked(cells: "KernelSession", code: str) -> None:
    cells.run("answer = None")
    cell = cells.run(code)

    assert cell.status == "ok", cell
    assert 0 < cells.ask("getattr(answer, 'output', answer).completion_tokens") <= 5


def test_samples_and_background_answers(cells: "KernelSession") -> None:
    assert cells.run("%%mlx_generate -n 4 --n 2 -o both\nHello").status == "ok"
    assert cells.ask("[len(answer.text) > 0 for answer in both]") == [True, True]
    assert cells.run("%%mlx_generate -n 4 --bg -o later\nHello").status == "ok"
    assert cells.run("done = await later").status == "ok"
    assert 0 < cells.ask("done.output.completion_tokens") <= 4


def test_a_conversation_goes_on(cells: "KernelSession") -> None:
    for question in ("Name a colour.", "Another?"):
        cell = cells.run(f"%%mlx_chat -n 6 -t 0\n{question}")
        assert cell.status == "ok", cell

    assert cells.ask("len(mlx_nb.conversation().turns)") == 2
    assert cells.run("%mlx_chat --reset").status == "ok"


@pytest.mark.parametrize(
    "code",
    [
        "%%mlx_batch frame -o result -n 4 -t 0\nRepeat {{ text }}",
        "result = frame.mlx.generate('Repeat {{ text }}', max_tokens=4, temperature=0)",
        "result = await frame.mlx.agenerate('Repeat {{ text }}', max_tokens=4, temperature=0)",
    ],
)
def test_rows_of_a_frame_are_answered(cells: "KernelSession", code: str) -> None:
    cell = cells.run(code)

    assert cell.status == "ok", cell
    assert cells.ask("[int(count) for count in result.completion_tokens]") == [4, 4, 4]
    assert cells.ask("bool(result.text[0] == result.text[2])") is True


def test_the_engine_is_listed_watched_and_steered(cells: "KernelSession", mlx_server: "MlxServer") -> None:
    listed = cells.run("%mlx_engine list").stdout.splitlines()[-1]
    assert re.fullmatch(
        rf"\* server · llama.* · running · 0 running, 0 waiting · .*{mlx_server.url}/v1", listed
    )
    status = cells.run("%mlx_engine status")
    assert any(VIEW in display for display in status.displays)
    assert cells.run("%mlx_engine stats -o stats").status == "ok"
    assert cells.ask("stats['remote']['url']") == f"{mlx_server.url}/v1"
    assert cells.run("%mlx_engine requests -o live").status == "ok"
    panel = cells.run("%mlx_chat --panel")
    assert any(VIEW in display for display in panel.displays)
    for command in ("pause", "resume", "warm", "use server", "restart", "models"):
        cell = cells.run(f"%mlx_engine {command}", 60)
        assert cell.status == "ok", cell


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("%%mlx_generate --regex [0-9]+\nHi", "has no structured output"),
        ("%%mlx_generate --logprobs 2\nHi", "leave logprobs out"),
        ("%%mlx_generate --count\nHi", "the tokenizer is the server's"),
        ("%%mlx_generate --ignore-eos\nHi", "ignore_eos"),
        ("%mlx_engine cache stats", "the server keeps its own prefix cache"),
        ("frame.mlx.classify(['a', 'b'], '{{ text }}')", "has no structured output"),
        ("frame.mlx.score('{{ text }}', ['a'])", "how likely"),
    ],
)
def test_what_the_server_has_not_is_refused_in_a_line(cells: "KernelSession", code: str, line: str) -> None:
    cell = cells.run(code)

    assert cell.status == "error"
    assert re.search(line, cell.reply["evalue"]), cell


def test_an_interrupt_keeps_what_came_and_frees_the_server(cells: "KernelSession") -> None:
    from kernel_session import eventually

    cell = cells.send("%%mlx_generate -n 100000 -t 0 -o answer\nGo on and on.")
    eventually(lambda: cell.texts and len(cell.texts[-1]) > 40)
    sent = cells.interrupt()
    cell.wait()

    assert cell.error[0] == "KeyboardInterrupt"
    assert cell.done_at - sent < 2
    assert cells.ask("answer.output.finish_reason") == "abort"
    assert cells.ask("len(answer.text) > 0") is True
    eventually(lambda: cells.ask("mlx_nb.current_engine().get_stats()['num_running']") == 0)
    assert time.monotonic() - sent < 10


def test_a_key_that_is_typed_in_or_in_the_environment_is_in_no_output_and_no_history(
    cells: "KernelSession", mlx_server: "MlxServer"
) -> None:
    cells.run(
        "import os, types, mlx_nb.session.keys as keys; os.environ['MY_KEY'] = 'sk-hidden'\n"
        "keys.getpass = types.SimpleNamespace(getpass=lambda *_: 'sk-hidden')"
    )
    shown = []
    for option in ("--key-env MY_KEY", "--ask-key"):
        cell = cells.run(f"%mlx_engine connect {mlx_server.url} --name keyed {option}", 60)
        assert cell.status == "ok", cell
        shown += [cell.stdout, cell.stderr, *map(str, cell.displays)]
        for code in ("%mlx_engine list", "%mlx_engine stats keyed", "%mlx_engine status keyed"):
            cell = cells.run(code)
            shown += [cell.stdout, cell.stderr, str(cell.value), *map(str, cell.displays)]
        cells.run("%mlx_engine stop keyed")

    assert "with the key from MY_KEY" in "".join(shown)
    assert "sk-hidden" not in "".join(shown)
    cell = cells.run("%mlx_engine connect http://127.0.0.1:9 --name keyed --key-env NO_SUCH_KEY")
    assert "NO_SUCH_KEY is not set" in cell.reply["evalue"]
    cells.run("%mlx_engine use server")
