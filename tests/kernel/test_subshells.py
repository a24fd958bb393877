"""Cells of a subshell, which run on a thread of their own beside the cells of the notebook."""

import pytest
from kernel_session import Cell, KernelSession, eventually

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def subshell(kernel: KernelSession) -> str:
    return kernel.new_subshell()


CALLS = {
    "awaited": ("value = %mlx_generate -n 4 --raw abc", "abca"),
    "blocking": ("%%time\nvalue = %mlx_generate -n 4 --raw abc", "abca"),
    "chat": ("get_ipython().run_cell_magic('mlx_chat', 'beside -n 4 -o value', 'abc')", "user"),
    "background": ("%mlx_generate --bg -n 4 -o handle --raw abc\nvalue = await handle", "abca"),
    "generate": ("import mlx_nb\nvalue = mlx_nb.generate('abc', raw=True, max_tokens=4)", "abca"),
    "agenerate": ("import mlx_nb\nvalue = await mlx_nb.agenerate('abc', raw=True, max_tokens=4)", "abca"),
}


@pytest.mark.parametrize(("code", "text"), CALLS.values(), ids=CALLS)
def test_everything_works_while_the_main_shell_is_busy(
    kernel: KernelSession, subshell: str, code: str, text: str
) -> None:
    busy = kernel.send("print('busy')\nwhile not globals().pop('enough', False):\n    time.sleep(0.01)")
    eventually(lambda: busy.stdout)

    cell = kernel.send(f"{code}\nprint(str(value))", subshell_id=subshell).wait()
    assert not busy.replied.is_set()
    kernel.send("enough = True", subshell_id=subshell).wait()

    assert busy.wait().displays == []
    assert (cell.status, text in cell.stdout.splitlines()) == ("ok", True)


def test_engines_are_looked_after_and_errors_are_one_line(kernel: KernelSession, subshell: str) -> None:
    def run(code: str) -> Cell:
        return kernel.send(code, subshell_id=subshell).wait()

    assert run("%mlx_engine list").stdout.startswith("* default · fake · running")
    assert run("%mlx_generate --bogus").stderr == "UsageError: unknown option --bogus: did you mean --bg?\n"


def test_an_interrupt_ends_the_cell_of_the_main_shell_alone(kernel: KernelSession, subshell: str) -> None:
    first = kernel.send("%mlx_generate -n 100000 --raw abc")
    second = kernel.send("%mlx_generate -n 60 --raw xyz", subshell_id=subshell)
    eventually(lambda: first.texts and "abc" in first.texts[0] and second.texts and "xyz" in second.texts[0])

    sent = kernel.interrupt()

    assert first.wait().error[0] == "KeyboardInterrupt"
    assert first.done_at - sent < 0.5
    assert second.wait().status == "ok"
    assert second.texts[0] == "xyz" * 20
