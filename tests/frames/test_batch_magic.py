"""``%%mlx_batch``, in a shell and in a real kernel."""

import time
from collections.abc import Iterator
from textwrap import dedent

import pandas as pd
import pytest
import shells
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from .conftest import Adopt, prompt_of


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[InteractiveShell]:
    """Return a shell with the extension and a DataFrame `df` in it."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = shells.begin()
    shell.run_line_magic("load_ext", "mlx_nb")
    shell.user_ns["df"] = pd.DataFrame({"text": ["a", None, "fail"], "n": [1, 2, 3]}, index=[4, 4, 5])
    yield shell
    shell.run_line_magic("unload_ext", "mlx_nb")
    shells.end(shell)


def batch(shell: InteractiveShell, line: str, cell: str = "{{ text }}\n") -> pd.DataFrame | None:
    return shell.run_cell_magic("mlx_batch", line, cell)


def test_the_result_goes_into_the_variable(shell, engine) -> None:
    assert batch(shell, "df -o result") is None

    result = shell.user_ns["result"]
    assert result["text"].tolist() == ["A", pd.NA, pd.NA]
    assert result["finish_reason"].tolist() == ["stop", "skipped", "error"]
    assert result.index.tolist() == [4, 4, 5]


@pytest.mark.parametrize(
    "line", ["df", 'df["text"]', "df[df['n'] < 9]", "-n 9 df", "df.assign(m=1) --max-tokens=9"]
)
def test_without_a_variable_the_result_is_the_cells_value(shell, engine, line: str) -> None:
    assert batch(shell, line)["text"].iloc[0] == "A"


def test_options_reach_the_engine(shell, adopt: Adopt) -> None:
    asked = []
    adopt(lambda request: asked.append((prompt_of(request), request.params)) or b"xyz", name="other")
    adopt(name="default")

    result = batch(
        shell, "df.head(1) -n 2 -t 0.5 --seed 7 --stop q --stop w --raw -e other", "<{{ text }}> {k}\n\n"
    )

    ((prompt, params),) = asked
    assert prompt == "<a> {k}"
    assert (params.max_tokens, params.temperature, params.seed, params.stop) == (2, 0.5, 7, ("q", "w"))
    assert result["text"].tolist() == ["xy"]


@pytest.mark.parametrize(
    ("line", "cell", "message"),
    [
        ("", "{{ text }}", "needs a DataFrame"),
        ("-o result", "{{ text }}", "needs a DataFrame"),
        ("dff -o r", "{{ text }}", "no variable 'dff'; did you mean 'df'?"),
        ("df.nope", "{{ text }}", "df.nope: AttributeError"),
        ("df['n']", "{{ n }}", "holds no text"),
        ("3", "{{ text }}", "DataFrame or a Series is needed, got int"),
        ("df -o 3x", "{{ text }}", "name of a variable"),
        ("df --max-token 3", "{{ text }}", "did you mean --max-tokens?"),
        ("df -n -3", "{{ text }}", "max_tokens must be at least 0"),
        ("df -e other", "{{ text }}", "no engine 'other'"),
        ("df", "{{ texts }}", "did you mean 'text'?"),
        ("df", "\n", "names no column"),
        ("df --col max_tokens", "{{ text }}", "--col takes OPTION=COLUMN"),
        ("df --col max_tokens=m", "{{ text }}", "no column 'm'"),
        ("df --col max-tokens=n -n 3", "{{ text }}", "max_tokens is given twice"),
        ("df --col max_tokns=n", "{{ text }}", "unknown sampling parameter 'max_tokns'"),
        ("df --shape tall", "{{ text }}", "--shape takes long|wide"),
        ("df --n 2", "{{ text }}", "with temperature 0"),
        ("df --schema nope", "{{ text }}", "no 'nope'"),
        ("df --choices a,b", "{{ text }}", "choices is not supported by the fake backend"),
        ("df --into text", "{{ text }}", "there is a column 'text' already"),
        ("df --model other", "{{ text }}", "no engine runs the model 'other'"),
        ("df --no-retry", "{{ text }}", "retry is about what a checkpoint knows"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(shell, engine, line: str, cell: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        batch(shell, line, cell)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_structure_samples_and_the_source_are_options_too(shell, adopt: Adopt, tmp_path) -> None:
    asked = []
    adopt(lambda request: asked.append(request.params) or b'{"a": 1}', structured=True)
    shell.user_ns["schema"] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shell.user_ns["rows"] = pd.DataFrame({"text": ["x", "y"], "most": [20, 30], "end": ["q", None]})

    fields = batch(
        shell, "rows --schema schema --parsed --join --into said --col max_tokens=most --col stop=end"
    )
    several = batch(shell, "rows --n 2 --shape wide -t 1 --seed 3 --into answer")
    choices = batch(shell, "rows.head(1) --choices a,b --model fake")

    assert fields["a"].tolist() == [1, 1]
    assert fields["parsed"].tolist() == [{"a": 1}, {"a": 1}]
    assert fields.columns[:3].tolist() == ["text", "most", "end"]
    assert sorted((p.max_tokens, p.stop) for p in asked[:2]) == [(20, ("q",)), (30, ())]
    assert several.columns[3:].tolist() == ["answer_0", "answer_error_0", "answer_1", "answer_error_1"]
    assert sorted(p.seed for p in asked[2:6]) == [3, 3, 4, 4]
    assert asked[-1].choices == ("a", "b")
    assert choices["state"].tolist() == ["done"]


def test_a_checkpoint_is_an_option(shell, adopt: Adopt, tmp_path) -> None:
    asked = []

    def script(request):
        asked.append(prompt_of(request))
        if "fail" in asked[-1]:
            raise RuntimeError("no")
        return b"x"

    adopt(script)
    path = tmp_path / "a job"

    for options in ("", "", "--no-retry"):
        batch(shell, f"df --checkpoint '{path}' {options} -o result")

    assert len(asked) == 3
    assert shell.user_ns["result"]["state"].tolist() == ["done", "skipped", "failed"]


def test_without_an_engine_one_line_says_how_to_start_one(shell, session) -> None:
    with pytest.raises(UsageError, match="no engine is running: start one with %mlx_engine start"):
        batch(shell, "df")


SETUP = """
    %load_ext mlx_nb
    import time
    import pandas as pd
    from mlx_nb import AsyncEngineCore, EngineCore
    from mlx_nb.backends.fake import fake_backend
    from mlx_nb.session.session import default_session

    asked, hurried = [], False

    def script(request):
        slow = b"slow" in bytes(request.prompt_token_ids)
        asked.append(slow)
        while slow and not hurried:
            yield ord("z")
        yield ord("q")

    core = EngineCore(None, None, backend=fake_backend(script, step_s=0.01))
    default_session().adopt("default", "fake", AsyncEngineCore.over(core))
    df = pd.DataFrame({"text": ["a", "slow", None]})
"""
REPORT = "print(part['finish_reason'].tolist(), core.get_stats()['active_requests'])"


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("default")
def test_in_a_kernel_an_interrupt_leaves_the_finished_rows_and_the_next_cell_works(tmp_path) -> None:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")

    def run(code: str, *, interrupt_after: float | None = None) -> tuple[str, str, float]:
        """Return status, what was printed, and the seconds from the interrupt to the end."""
        printed: list[str] = []
        message = client.execute(dedent(code))
        if interrupt_after is not None:
            time.sleep(interrupt_after)
            manager.interrupt_kernel()
        begun = time.monotonic()
        while True:
            out = client.get_iopub_msg(timeout=30)
            if out["parent_header"].get("msg_id") != message:
                continue
            if out["msg_type"] == "stream" and out["content"]["name"] == "stdout":
                printed.append(out["content"]["text"])
            if out["msg_type"] == "status" and out["content"]["execution_state"] == "idle":
                break
        seconds = time.monotonic() - begun
        reply = client.get_shell_msg(timeout=30)
        while reply["parent_header"]["msg_id"] != message:  # to the client's own questions
            reply = client.get_shell_msg(timeout=30)
        return reply["content"]["status"], "".join(printed), seconds

    try:
        assert run(SETUP)[0] == "ok"
        # The accessor is there because pandas was imported after the extension; the cell blocks, and no loop helps.
        status, printed, _ = run("print(df['text'].head(1).mlx.generate()['text'].tolist())")
        assert (status, printed) == ("ok", "['q']\n")

        ways = {
            "blocking": "try:\n    df.mlx.generate('{{ text }}', max_tokens=4000)\n"
            "except KeyboardInterrupt as error:\n    part = error.partial",
            "blocking in a cell that awaits": "import asyncio; await asyncio.sleep(0)\n"
            "try:\n    df.mlx.generate('{{ text }}', max_tokens=4000)\n"
            "except KeyboardInterrupt as error:\n    part = error.partial",
            "magic": "%%mlx_batch df -o part -n 4000\n{{ text }}",
            "blocking magic": "%%capture\n%%mlx_batch df -o part -n 4000\n{{ text }}",
        }
        for way, code in ways.items():
            run("part = None")
            status, _, seconds = run(code, interrupt_after=1.0)
            # The magic ends its cell as interrupted, so that Run All stops (%%capture keeps errors to itself).
            assert (way, status) == (way, "error" if way == "magic" else "ok")
            assert seconds < 0.5, way
            assert (way, run(REPORT)[1]) == (way, "['stop', 'abort', 'skipped'] 0\n")

        # With a checkpoint the cell goes on, when it is run again, with what is missing.
        cell = f"%%mlx_batch df -o part -n 4000 --checkpoint '{tmp_path / 'job'}'\n{{{{ text }}}}"
        assert run(cell, interrupt_after=1.0)[0] == "error"
        run("asked.clear(); hurried = True")
        assert run(cell)[0] == "ok"
        assert run(REPORT)[1] == "['stop', 'stop', 'skipped'] 0\n"
        assert run("print(asked)")[1] == "[True]\n"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
