"""What an interrupt or a cancellation leaves, and that a job never holds a loop up."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

import pandas as pd
import pytest

import mlx_nb.frames.accessor  # noqa: F401 - registers
from mlx_nb import EngineCore, GenerationCancelled, GenerationInterrupted

from .conftest import Adopt, prompt_of

PROMPT_S = 0.5
SECONDS = ["queue_s", "ttft_s", "total_s"]


def answer(request):
    """Answer quickly, except the rows that say "slow": those never end."""
    while "slow" in prompt_of(request):
        yield ord("z")
    yield ord("q")


@pytest.fixture
def press_ctrl_c() -> Callable[[Callable[[], object]], list[float]]:
    """Return a function that sends SIGINT to this process once `when()` is true; the times it was sent."""
    threads = []

    def start(when: Callable[[], object]) -> list[float]:
        sent: list[float] = []

        def wait() -> None:
            deadline = time.monotonic() + 20
            while not when() and time.monotonic() < deadline:
                time.sleep(0.01)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=wait)
        thread.start()
        threads.append(thread)
        return sent

    yield start
    for thread in threads:
        thread.join()


ROWS = pd.Series(
    ["a", "b", "slow c", None, "slow d", *"efghijklmnop"], index=[i // 2 for i in range(16)] + [99]
)


def is_stuck(core: EngineCore) -> bool:
    """Return whether both places of the batch are taken by rows that never end."""
    made = [row["completion_tokens"] for row in core.get_stats()["requests"] if row["phase"] == "decode"]
    return len(made) == 2 and min(made) > 3


def check_partial(partial: pd.DataFrame) -> None:
    reasons = partial["finish_reason"].tolist()
    assert partial.index.tolist() == ROWS.index.tolist()
    assert reasons[:5] == ["stop", "stop", "abort", "skipped", "abort"]
    assert partial["text"].iloc[0] == "q"
    assert set(partial["text"].iloc[2]) == {"z"}
    assert "aborted" in partial["error"].iloc[2]


def test_ctrl_c_gives_the_finished_rows_within_half_a_second(adopt: Adopt, press_ctrl_c) -> None:
    core = adopt(answer, batch=2, step_s=0.01)
    handler = signal.getsignal(signal.SIGINT)
    sent = press_ctrl_c(lambda: is_stuck(core))

    with pytest.raises(GenerationInterrupted, match=r"of 17 rows are finished: see \.partial") as caught:
        ROWS.mlx.generate(raw=True, max_tokens=4000, progress=False)

    assert time.monotonic() - sent[0] < PROMPT_S
    check_partial(caught.value.partial)
    assert (caught.value.partial["finish_reason"] == "abort").sum() == 14
    assert caught.value.partial["error"].iloc[-1] == "aborted before it was started"
    assert signal.getsignal(signal.SIGINT) is handler
    assert core.get_stats()["active_requests"] == 0
    assert pd.Series(["x"]).mlx.generate(progress=False)["text"].tolist() == ["q"]


def test_an_interrupted_job_is_a_keyboard_interrupt(adopt: Adopt, press_ctrl_c) -> None:
    core = adopt(answer, step_s=0.01)
    press_ctrl_c(lambda: core.get_stats()["num_running"])

    with pytest.raises(KeyboardInterrupt):
        pd.Series(["slow"]).mlx.generate(raw=True, max_tokens=4000, progress=False)


def test_ctrl_c_gets_through_while_the_model_loads(adopt: Adopt, press_ctrl_c) -> None:
    adopt(answer, load_s=2.0)
    sent = press_ctrl_c(lambda: time.sleep(0.3) or True)

    with pytest.raises(KeyboardInterrupt):
        pd.Series(["a"]).mlx.generate(progress=False)

    assert time.monotonic() - sent[0] < PROMPT_S


def test_a_second_ctrl_c_ends_a_row_that_hangs(adopt: Adopt, press_ctrl_c) -> None:
    adopt(answer)

    class Hanging:
        """A value that can't be printed in reasonable time."""

        def __str__(self) -> str:
            hanging.set()
            time.sleep(10)
            return "late"

    hanging = threading.Event()
    press_ctrl_c(hanging.is_set)
    sent = press_ctrl_c(lambda: hanging.is_set() and not time.sleep(0.2))

    with pytest.raises(GenerationInterrupted) as caught:
        pd.DataFrame({"v": ["a", Hanging()]}).mlx.generate("{{ v }}", progress=False)

    assert time.monotonic() - sent[0] < PROMPT_S
    assert caught.value.partial["finish_reason"].iloc[1] == "abort"


def test_a_job_runs_on_a_thread_that_gets_no_signals(adopt: Adopt) -> None:
    adopt(answer)
    results = []
    thread = threading.Thread(target=lambda: results.append(ROWS[:2].mlx.generate(progress=False)))
    thread.start()
    thread.join()

    assert results[0]["text"].tolist() == ["q", "q"]


# -- awaited ----------------------------------------------------------------------------------------------------


async def test_an_awaited_job_equals_a_blocking_one(engine) -> None:
    frame = pd.DataFrame({"text": ["a", None, "fail", "", *"defghijklmnop"]})

    awaited = await frame.mlx.agenerate("<{{ text }}>", progress=False)
    of_series = await frame["text"].mlx.agenerate("<{{ text }}>", progress=False)

    # A blocking call on the loop's own thread works as well.
    expected = frame.mlx.generate("<{{ text }}>", progress=False).drop(columns=SECONDS)
    pd.testing.assert_frame_equal(awaited.drop(columns=SECONDS), expected)
    pd.testing.assert_frame_equal(of_series.drop(columns=SECONDS), expected)


async def test_the_loop_goes_on_while_a_job_is_awaited(adopt: Adopt) -> None:
    adopt(answer, batch=2, step_s=0.02)
    beats, over = 0, False

    async def beat() -> None:
        nonlocal beats
        while not over:
            await asyncio.sleep(0)
            beats += 1

    beating = asyncio.create_task(beat())
    await ROWS[:2].mlx.agenerate(progress=False)
    of_waiting, beats = beats, 0
    await pd.Series([None] * 20_000).mlx.agenerate(progress=False)  # none of them waits for the engine
    over = True
    await beating

    assert of_waiting > 20
    assert beats > 5


async def test_two_jobs_at_once_share_the_engine(adopt: Adopt) -> None:
    adopt(batch=2, step_s=0.001)

    first, second = await asyncio.gather(
        pd.Series([f"a{i}" for i in range(20)]).mlx.agenerate(progress=False),
        pd.Series([f"b{i}" for i in range(20)]).mlx.agenerate(progress=False),
    )

    assert first["text"].tolist() == [f"A{i}" for i in range(20)]
    assert second["text"].tolist() == [f"B{i}" for i in range(20)]


async def test_cancelling_aborts_and_keeps_the_finished_rows(adopt: Adopt) -> None:
    core = adopt(answer, batch=2, step_s=0.001)
    caught: list[GenerationCancelled] = []

    async def job() -> None:
        try:
            await ROWS.mlx.agenerate(raw=True, max_tokens=4000, progress=False)
        except GenerationCancelled as cancelled:
            caught.append(cancelled)
            raise

    task = asyncio.create_task(job())
    while not is_stuck(core):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    check_partial(caught[0].partial)
    assert core.get_stats()["active_requests"] == 0
