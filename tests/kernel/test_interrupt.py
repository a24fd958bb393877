"""Kernel > Interrupt, by real signals."""

import time

import pytest
from kernel_session import KernelSession, eventually

pytestmark = pytest.mark.kernel

AWAITED = "%mlx_generate -n 100000 --raw abc"
CELLS = {
    "awaited": AWAITED,
    "cell": "%%mlx_generate -n 100000 --raw\nabc",
    "time": f"%%time\n{AWAITED}",
    "function": f"def f():\n    {AWAITED}\nf()",
    "after-await": f"await asyncio.sleep(0)\ndef f():\n    {AWAITED}\nf()",
}


@pytest.mark.parametrize("code", CELLS.values(), ids=CELLS)
def test_an_interrupt_ends_the_cell_at_once_and_the_next_cell_works(kernel: KernelSession, code: str) -> None:
    cell = kernel.send(code)
    after = kernel.send("went_on = True")
    eventually(lambda: cell.texts and len(cell.texts[0]) > 8)

    sent = kernel.interrupt()
    cell.wait()

    assert cell.done_at - sent < 0.5
    assert cell.status == "error"
    assert cell.error[0] == "KeyboardInterrupt"
    assert len(cell.traceback) == 1
    assert "interrupted" in cell.texts[-1]
    assert after.wait().status == "aborted", "Run All stops"
    assert kernel.run("%mlx_generate -n 3 --raw xyz").texts[0] == "xyz"
    assert kernel.ask("engine.get_stats()['active_requests']") == 0


@pytest.mark.parametrize(
    "call",
    [
        "engine.generate('abc', SamplingParams(max_tokens=100000))",
        "frame.mlx.agenerate('{{ text }}', max_tokens=100000)",
        "asyncio.sleep(20)",
    ],
    ids=["generate", "frame", "anything"],
)
def test_a_cell_that_awaits_something_is_interrupted_at_once(kernel: KernelSession, call: str) -> None:
    kernel.run("import asyncio, pandas\nframe = pandas.DataFrame({'text': ['abc']})")
    # The error is caught, since IPython may take half a second to draw a traceback.
    cell = kernel.send(
        f"from mlx_nb import SamplingParams\nprint('begun')\n"
        f"try:\n    await {call}\nexcept asyncio.CancelledError:\n    print('cancelled')"
    )
    eventually(lambda: cell.stdout)
    time.sleep(0.2)

    sent = kernel.interrupt()
    cell.wait()

    assert cell.done_at - sent < 0.5
    assert cell.stdout == "begun\ncancelled\n"
    assert kernel.ask("engine.get_stats()['active_requests']") == 0
    assert kernel.run("%mlx_generate -n 3 --raw xyz").texts[0] == "xyz"


BESIDE = {
    "line": "get_ipython().run_line_magic('mlx_generate', '-n 100000 --raw abc')",
    "cell": "get_ipython().run_cell_magic('mlx_batch', 'frame -n 100000', '{{ text }}')",
    "frame": "frame.mlx.generate('{{ text }}', max_tokens=100000)",
}


@pytest.mark.parametrize("call", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("way", ["asyncio.create_task(ask())", "loop.call_soon(answer)"])
def test_a_call_that_blocks_beside_the_cell_is_interrupted_without_harm(
    kernel: KernelSession, call: str, way: str
) -> None:
    kernel.run("import asyncio, pandas\nframe = pandas.DataFrame({'text': ['abc']})")
    cell = kernel.send(
        f"def answer():\n    {call}\nasync def ask():\n    answer()\n"
        f"loop = asyncio.get_running_loop()\nbeside = {way}\nawait asyncio.sleep(0.1)"
    )
    time.sleep(0.6)

    sent = kernel.interrupt()
    cell.wait()

    assert cell.done_at - sent < 0.5
    assert kernel.ask("engine.get_stats()['active_requests']") == 0
    assert kernel.ask("beside.cancelled()") is ("task" in way)
    assert kernel.run("%mlx_generate -n 3 --raw xyz").texts[0] == "xyz"


@pytest.mark.parametrize("before", ["", "%%time\n"], ids=["awaited", "blocking"])
def test_the_partial_answer_is_kept(kernel: KernelSession, before: str) -> None:
    for option, name in (("", "_"), ("-o partial", "partial")):
        cell = kernel.send(f"{before}%mlx_generate -n 100000 {option} --raw abc")
        eventually(lambda cell=cell: cell.texts and len(cell.texts[0]) > 8)
        kernel.interrupt()
        cell.wait()

        text, reason = kernel.ask(f"({name}.text, {name}.finish_reason)")
        assert reason == "abort"
        assert text.startswith("abcabcabc")
        assert cell.texts[0] == text


@pytest.mark.parametrize("before", ["", "%%time\n"], ids=["awaited", "blocking"])
def test_an_abort_from_elsewhere_ends_the_cell_as_an_interrupt_does(
    kernel: KernelSession, before: str
) -> None:
    subshell = kernel.new_subshell()
    cell = kernel.send(f"{before}%mlx_generate -n 100000 -o partial --raw abc")
    eventually(lambda: cell.texts and len(cell.texts[0]) > 8)

    kernel.send("engine.abort_all()", subshell_id=subshell).wait()

    assert cell.wait().error[0] == "KeyboardInterrupt"
    assert kernel.ask("partial.finish_reason") == "abort"


@pytest.mark.parametrize("before", ["", "%%time\n"], ids=["awaited", "blocking"])
def test_a_slow_step_does_not_hold_an_interrupt_up(kernel: KernelSession, before: str) -> None:
    kernel.run("slow = adopt('slow', step_s=3); default_session().use('default')")
    cell = kernel.send(f"{before}%mlx_generate -e slow --raw abc")
    eventually(lambda: cell.texts)

    sent = kernel.interrupt()

    assert cell.wait().done_at - sent < 0.5
    assert kernel.run("%mlx_generate -n 3 --raw xyz").texts[0] == "xyz"


LOADS_SLOWLY = """
from unittest import mock
def slow_start(model, config=None, **options):
    return AsyncEngineCore.over(EngineCore(None, None, config, backend=fake_backend(load_s=3)))
patched = mock.patch.object(AsyncEngineCore, "from_pretrained", slow_start)
patched.start()
"""


@pytest.mark.parametrize("before", ["", "%%time\n"], ids=["awaited", "blocking"])
def test_an_interrupt_discards_an_engine_that_loads(kernel: KernelSession, before: str) -> None:
    kernel.run(LOADS_SLOWLY)
    cell = kernel.send(f"{before}%mlx_engine start demo --name late")
    eventually(lambda: "loading nothing" in "".join(cell.texts))

    sent = kernel.interrupt()
    cell.wait()
    kernel.run("patched.stop()")

    assert cell.done_at - sent < 0.5
    assert cell.error[0] == "KeyboardInterrupt"
    assert kernel.ask("list(default_session().engines)")[0] == "default"
    assert "late" not in kernel.ask("list(default_session().engines)")
    assert kernel.run("%mlx_generate -n 3 --raw xyz").texts[0] == "xyz"
