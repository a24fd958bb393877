"""``%mlx_engine`` in a real kernel: what takes time is awaited, or blocks under ``%%time``, and stops at once."""

import time

import pytest
from kernel_session import KernelSession, eventually

pytestmark = pytest.mark.kernel

WAYS = pytest.mark.parametrize("before", ["", "%%time\n"], ids=["awaited", "blocking"])


@WAYS
def test_an_engine_restarts_and_serves_the_next_cell(kernel: KernelSession, before: str) -> None:
    kernel.run("engine.submit('abc', None, 'old')")

    cell = kernel.run(f"{before}%mlx_engine restart")

    assert cell.status == "ok", cell
    assert cell.texts[-1].startswith("fake is ready")
    assert kernel.run("%mlx_generate -n 3 --raw xyz").texts[0] == "xyz"


@WAYS
def test_an_interrupted_restart_leaves_an_engine_that_can_be_restarted(
    kernel: KernelSession, before: str
) -> None:
    kernel.run("late = adopt('late', load_s=2); late.wait_ready()")
    cell = kernel.send(f"{before}%mlx_engine restart late")
    after = kernel.send("went_on = True")
    eventually(lambda: "loading nothing" in "".join(cell.texts))

    sent = kernel.interrupt()
    cell.wait()

    assert cell.done_at - sent < 0.5
    assert cell.error[0] == "KeyboardInterrupt"
    assert after.wait().status == "aborted"
    eventually(lambda: kernel.ask("late.state") == "stopped")
    assert "is stopped: start it again with" in kernel.run("%mlx_generate -e late hi").stderr
    assert kernel.run("%mlx_engine restart late").texts[-1].startswith("fake is ready, called 'late'")
    kernel.run("%mlx_engine stop late\n%mlx_engine use default")
    assert kernel.run("%mlx_generate -n 3 --raw xyz").texts[0] == "xyz"


@WAYS
def test_what_the_engine_is_busy_with_does_not_hold_an_interrupt_up(
    kernel: KernelSession, before: str
) -> None:
    kernel.run(
        "slow = adopt('slow', step_s=3); request = slow.submit('abc'); default_session().use('default')"
    )
    cell = kernel.send(f"{before}print('begun', flush=True)\n%mlx_engine cache clear -e slow")
    eventually(lambda: cell.stdout)
    time.sleep(0.2)  # the engine is in a step of 3 s, and the cell waits for its end

    sent = kernel.interrupt()
    cell.wait()

    assert cell.done_at - sent < 0.5
    assert cell.error == ("KeyboardInterrupt", "cache clear was interrupted")
    assert len(cell.traceback) == 1
    kernel.run("slow.abort(request); slow.stop_soon(); default_session().forget('slow')")
    assert kernel.run("%mlx_generate -n 3 --raw xyz").texts[0] == "xyz"


def test_the_loop_goes_on_while_a_cell_waits(kernel: KernelSession) -> None:
    kernel.run("late = adopt('late', load_s=0.5); late.wait_ready()")
    kernel.run(
        "beats = []\nasync def beat():\n    while len(beats) < 1000:\n        beats.append(time.monotonic())\n"
        "        await asyncio.sleep(0.01)\ntask = asyncio.ensure_future(beat())"
    )

    kernel.run("before = len(beats)\n%mlx_engine restart late\nwhile_waiting = len(beats) - before")

    assert kernel.ask("while_waiting") > 10
    kernel.run("task.cancel()\n%mlx_engine stop late\n%mlx_engine use default")


def test_values_come_into_cells_and_variables(kernel: KernelSession) -> None:
    kernel.run("request = engine.submit('abc', None, 'mine')")

    assert "mine" in str(kernel.run("%mlx_engine requests").value)
    kernel.run("%mlx_engine stats -o s\n%mlx_engine cache stats -o c\n%mlx_engine abort mine")

    assert kernel.ask("s['state']") == "running"
    assert kernel.ask("'hits' in c")
    assert kernel.ask("engine.get_stats()['active_requests']") == 0


def test_completion_reaches_the_browser(kernel: KernelSession) -> None:
    assert kernel.complete("%mlx_engine start --max-num-s") == ["--max-num-seqs"]
    assert kernel.complete("%%mlx_generate -e def") == ["default"]


def test_a_process_forked_from_a_cell_gets_a_clear_error(kernel: KernelSession) -> None:
    cell = kernel.run(
        "import multiprocessing, warnings\nwarnings.simplefilter('ignore')\n"
        "def ask(prompt):\n"
        "    try:\n        return engine.generate_sync(prompt).output_text\n"
        "    except Exception as error:\n        return str(error)\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n    said = pool.map(ask, ['abc'])"
    )

    assert cell.status == "ok", cell
    assert kernel.ask("said")[0].startswith("this process was forked from the one that runs the engine")
    assert kernel.run("%mlx_generate -n 3 --raw xyz").texts[0] == "xyz"
