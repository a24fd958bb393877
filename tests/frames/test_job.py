"""The loop that runs prompts over rows, on an engine without a model."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from mlx_nb import SamplingParams
from mlx_nb.frames.job import Ask, Job, Outcome, Skipped
from mlx_nb.frames.keys import Keys

from .conftest import Adopt, prompt_of
from .jobs import GREEDY, make_job, run_job

HOT = SamplingParams(temperature=1.0, max_tokens=20)
STOP_S = 0.3


def until(when: Callable[[], object]) -> None:
    """Wait until `when()` is true."""
    deadline = time.monotonic() + 20
    while not when():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def answer(request) -> Iterator[int]:
    """Answer at once, except the rows that say "slow": those never end."""
    while "slow" in prompt_of(request):
        yield ord("z")
    yield ord("q")


class Counted:
    """A script that counts how often each prompt was run."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()

    def __call__(self, request) -> bytes:
        self.runs[prompt_of(request)] += 1
        if "fail" in prompt_of(request):
            raise RuntimeError("the script failed")
        return prompt_of(request).upper().encode() + str(self.runs.total()).encode()


# -- rows bring their own parameters ----------------------------------------------------------------------------


def test_each_row_has_its_own_parameters(adopt: Adopt) -> None:
    core = adopt(lambda request: b"x" * 100)

    outcomes = run_job(core, ["a", "a", "b"], [GREEDY.but(max_tokens=n) for n in (1, 3, 2)])

    assert [outcome.text for outcome in outcomes] == ["x", "xxx", "xx"]


def test_an_outcome_has_all_that_the_engine_tells(adopt: Adopt) -> None:
    core = adopt(lambda request: b"<think>why</think>yes")

    (outcome,) = run_job(core, ["hm"], GREEDY.but(logprobs=1, max_tokens=50))

    assert (outcome.text, outcome.reasoning) == ("yes", "why")
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens) == (2, 21, 0)
    assert len(outcome.logprobs) == 21
    assert 0 <= outcome.queue_s <= outcome.ttft_s <= outcome.total_s < 20
    assert outcome.timings == {
        "queue_s": outcome.queue_s, "ttft_s": outcome.ttft_s, "total_s": outcome.total_s,
    }  # fmt: skip


# -- the same is asked once -------------------------------------------------------------------------------------


def test_identical_prompts_run_once_wherever_they_stand(adopt: Adopt) -> None:
    script = Counted()
    core = adopt(script, batch=2)
    prompts = [*"abcabc", *"defghijklm", *"abc", "c"]

    outcomes = run_job(core, prompts)

    assert set(script.runs.values()) == {1}
    assert [outcome.text[0] for outcome in outcomes] == [prompt.upper() for prompt in prompts]
    assert outcomes[0] == outcomes[3] == outcomes[16]


def test_rows_that_wait_for_one_in_flight_get_its_answer(adopt: Adopt) -> None:
    let_go = threading.Event()
    script = Counted()

    def slowly(request) -> bytes:
        let_go.wait(10)
        return script(request)

    outcomes: dict[int, Outcome] = {}
    job = make_job(adopt(slowly, batch=2), ["a"] * 30, outcomes)
    thread = threading.Thread(target=job.run)
    thread.start()
    until(lambda: job.snapshot().running == 1)
    let_go.set()
    thread.join()

    assert script.runs == {"a": 1}
    assert {outcome.text for outcome in outcomes.values()} == {"A1"}
    assert job.snapshot().reused == 29


def test_a_failure_is_shared_too(adopt: Adopt) -> None:
    script = Counted()

    outcomes = run_job(adopt(script), ["fail"] * 3)

    assert script.runs == {"fail": 1}
    assert [outcome.error for outcome in outcomes] == ["RuntimeError: the script failed"] * 3


def test_when_one_is_aborted_the_next_like_it_runs(adopt: Adopt) -> None:
    let_go = threading.Event()

    def slowly(request) -> bytes:
        let_go.wait(10)
        return prompt_of(request).encode()

    outcomes: dict[int, Outcome] = {}
    core = adopt(slowly, batch=2)
    job = make_job(core, ["a"] * 5, outcomes)
    thread = threading.Thread(target=job.run)
    thread.start()
    until(lambda: job.snapshot().running == 1)
    core.abort_all()
    let_go.set()
    thread.join()

    assert [outcomes[i].finish_reason for i in range(5)] == ["abort", *["stop"] * 4]
    assert {outcomes[i].text for i in range(1, 5)} == {"a"}


def test_answers_that_are_drawn_afresh_are_not_shared(adopt: Adopt) -> None:
    script = Counted()

    outcomes = run_job(adopt(script), ["a"] * 4, HOT)

    assert script.runs == {"a": 4}
    assert len({outcome.text for outcome in outcomes}) == 4


def test_the_same_seed_is_asked_once_and_another_seed_is_another_row(adopt: Adopt) -> None:
    script = Counted()

    run_job(adopt(script), ["a"] * 4, [HOT.but(seed=seed) for seed in (0, 1, 0, 1)])

    assert script.runs == {"a": 2}


CHANGES = {
    "max_tokens": {"max_tokens": 3},
    "stop": {"stop": "x"},
    "logit_bias": {"logit_bias": {65: 1.0}},
    "logprobs": {"logprobs": 0},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "ignore_eos": {"ignore_eos": True},
    "seed": {"temperature": 1.0, "seed": 3},
    "processors": {"logits_processors": [lambda tokens, logits: logits]},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_other_parameters_are_another_question(adopt: Adopt, change) -> None:
    script = Counted()

    run_job(adopt(script), ["a", "a"], [GREEDY, GREEDY.but(**change)])

    assert script.runs == {"a": 2}


def test_rows_with_logits_processors_all_run(adopt: Adopt) -> None:
    script = Counted()

    run_job(adopt(script), ["a", "a"], GREEDY.but(logits_processors=[lambda tokens, logits: logits]))

    assert script.runs == {"a": 2}


@dataclass
class Picture:
    """Known by its digest."""

    digest: str


def test_another_image_or_model_is_another_question() -> None:
    def key(model: str, *digests: str) -> bytes | None:
        return Keys(model).of(Ask("what is it?", "what", GREEDY, [Picture(digest) for digest in digests]))

    different = [
        key("m"),
        key("m", "a"),
        key("m", "b"),
        key("m", "a", "b"),
        key("m", "b", "a"),
        key("n", "a"),
    ]

    assert len(set(different)) == 6
    assert key("m", "a", "b") == different[3]


# -- what is wrong with a row -----------------------------------------------------------------------------------


def test_what_is_wrong_with_a_row_concerns_it_alone(adopt: Adopt) -> None:
    core = adopt(context_length=30)

    outcomes = run_job(
        core, ["a", Skipped("it is empty"), ValueError("no such\nthing"), "fail", "x" * 50, "", [5000], "b"]
    )

    assert [outcome.finish_reason for outcome in outcomes] == [
        "stop", "skipped", "error", "error", "error", "error", "error", "stop",
    ]  # fmt: skip
    assert outcomes[1].error == "it is empty"
    assert outcomes[2].error == "ValueError: no such thing"
    assert "context ends at 30" in outcomes[4].error


def test_an_engine_that_stops_leaves_every_other_row_an_error(adopt: Adopt) -> None:
    def script(request) -> bytes:
        if prompt_of(request) == "20":
            core.stop_soon()
        return b"x"

    core = adopt(script, batch=2)

    outcomes = run_job(core, map(str, range(200)))

    assert len(outcomes) == 200
    assert {outcome.finish_reason for outcome in outcomes[:15]} == {"stop"}
    assert {outcome.finish_reason for outcome in outcomes[30:]} == {"error"}
    assert all("stopped" in outcome.error for outcome in outcomes[30:])


def test_rows_that_an_engine_never_gets_are_not_made_once_it_is_stopped(adopt: Adopt) -> None:
    made = []

    def prompts() -> Iterator[str]:
        for number in range(5000):
            made.append(number)
            yield str(number)

    def ask(prompt: str) -> Ask:
        if prompt == "20":
            core.stop_now()
        asked.append(prompt)
        return Ask(prompt, prompt, GREEDY)

    core, asked, outcomes = adopt(batch=2), [], {}
    Job(core, prompts(), ask, outcomes.__setitem__).run()

    assert len(outcomes) == len(made) == 5000
    assert len(asked) < 200
    assert all("stopped" in outcomes[number].error for number in range(200, 5000))


@pytest.mark.parametrize("awaited", [False, True])
def test_a_restarted_engine_goes_on_with_the_rows_that_are_left(adopt: Adopt, awaited: bool) -> None:
    def script(request) -> bytes:
        if prompt_of(request) == "same" and not restarted:
            restarted.append(True)
            core.restart_soon()
        return b"x"

    restarted: list[bool] = []
    core, outcomes = adopt(script, batch=2), {}
    job = make_job(core, ["same", *map(str, range(2000)), "same"], outcomes)
    if awaited:
        asyncio.run(job.arun())
    else:
        job.run()

    ends = [outcomes[position].finish_reason for position in range(2002)]
    assert "stopped" in outcomes[0].error
    assert ends.count("error") < 1000  # those in flight, and few that come between stop and start
    assert ends[-1] == "stop"  # nobody's answer is that the engine was stopped


# -- pause, resume, stop ----------------------------------------------------------------------------------------


@pytest.fixture
def start() -> Iterator[Callable[[Job], threading.Thread]]:
    """Return a function that runs a job on a thread."""
    threads = []

    def started(job: Job) -> threading.Thread:
        thread = threading.Thread(target=job.run)
        thread.start()
        threads.append((thread, job))
        return thread

    yield started
    for thread, job in threads:
        job.stop()
        thread.join()


def test_a_paused_job_lets_running_rows_finish_and_starts_no_others(adopt: Adopt, start) -> None:
    core = adopt(batch=2, step_s=0.002)
    outcomes: dict[int, Outcome] = {}
    job = make_job(core, map(str, range(100)), outcomes, total=100)
    thread = start(job)
    until(lambda: len(outcomes) > 10)

    job.pause()
    until(lambda: not job.snapshot().running)
    so_far = len(outcomes)
    time.sleep(0.1)
    paused = job.snapshot()

    assert len(outcomes) == so_far < 100
    assert (paused.state, paused.running, paused.done) == ("paused", 0, so_far)
    job.resume()
    thread.join()
    assert [outcomes[i].text for i in range(100)] == [str(i) for i in range(100)]
    assert job.snapshot().state == "finished"


def test_a_job_that_is_paused_before_it_begins_waits(adopt: Adopt, start) -> None:
    outcomes: dict[int, Outcome] = {}
    job = make_job(adopt(), ["a"], outcomes)
    job.pause()
    thread = start(job)
    time.sleep(0.1)

    assert outcomes == {}
    assert thread.is_alive()
    job.resume()
    thread.join()
    assert outcomes[0].text == "A"


@pytest.mark.parametrize("paused", [False, True])
def test_stop_gives_what_is_finished_at_once(adopt: Adopt, start, paused: bool) -> None:
    core = adopt(answer, batch=2, step_s=0.01)
    outcomes: dict[int, Outcome] = {}
    job = make_job(core, ["a", "slow b", "slow c", *"defgh"], outcomes, GREEDY.but(max_tokens=4000), total=8)
    thread = start(job)
    until(lambda: job.snapshot().done == 1 and core.get_stats()["num_running"] == 2)
    if paused:
        job.pause()

    began = time.monotonic()
    job.stop()
    thread.join()

    assert time.monotonic() - began < STOP_S
    assert outcomes[0].text == "q"
    assert [outcomes[i].finish_reason for i in (1, 2)] == ["abort", "abort"]
    assert set(outcomes[1].text) == {"z"}
    assert len(outcomes) <= 5
    assert (job.snapshot().state, job.snapshot().done) == ("stopped", 1)
    assert core.get_stats()["active_requests"] == 0


def test_a_stop_before_the_beginning_starts_nothing(adopt: Adopt) -> None:
    outcomes: dict[int, Outcome] = {}
    job = make_job(adopt(), ["a"], outcomes)
    job.stop()
    job.run()

    assert outcomes == {}
    assert job.snapshot().state == "stopped"


async def test_an_awaited_job_is_paused_resumed_and_stopped_as_well(adopt: Adopt) -> None:
    outcomes: dict[int, Outcome] = {}
    job = make_job(adopt(batch=2, step_s=0.001), map(str, range(10_000)), outcomes)
    task = asyncio.create_task(job.arun())
    while len(outcomes) < 10:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.002)
    job.pause()
    while job.snapshot().running:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    so_far = len(outcomes)
    await asyncio.sleep(0.05)
    assert len(outcomes) == so_far
    job.resume()
    while len(outcomes) == so_far:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    began = time.monotonic()
    job.stop()
    await task

    assert time.monotonic() - began < STOP_S
    assert so_far < len(outcomes) < 10_000


# -- snapshots --------------------------------------------------------------------------------------------------


def test_a_snapshot_counts_every_kind_of_end(adopt: Adopt) -> None:
    outcomes: dict[int, Outcome] = {}
    prompts = ["a", "a", Skipped("it is null"), "fail", "a long one"]
    job = make_job(adopt(), prompts, outcomes, GREEDY.but(max_tokens=5), total=5, label="row {}".format)
    before = job.snapshot()
    job.run()
    after = job.snapshot()

    assert (before.state, before.done, before.left_s, before.elapsed_s, before.recent) == (
        "new", 0, None, 0.0, (),
    )  # fmt: skip
    assert after.state == "finished"
    assert (after.total, after.done, after.running) == (5, 5, 0)
    assert (after.failed, after.skipped, after.truncated, after.reused) == (1, 1, 1, 1)
    assert after.rows_per_second > 0
    assert after.tokens_per_second > 0
    assert after.left_s == 0.0
    shown = {(one.label, one.prompt, one.answer, one.finish_reason) for one in after.recent}
    assert ("row 4", "a long one", "A LON", "length") in shown
    assert ("row 3", "fail", "RuntimeError: the script failed", "error") in shown
    assert ("row 2", "", "it is null", "skipped") in shown


def test_a_snapshot_tells_how_long_it_will_take(adopt: Adopt, start) -> None:
    core = adopt(lambda request: b"x", batch=2, step_s=0.005)
    job = make_job(core, map(str, range(4000)), {}, total=4000)
    start(job)
    until(lambda: job.snapshot().done > 200)
    snapshot = job.snapshot()

    assert snapshot.left_s == pytest.approx((4000 - snapshot.done) / snapshot.rows_per_second)
    assert snapshot.rows_per_second == pytest.approx(snapshot.done / snapshot.elapsed_s, rel=0.5)
    assert 0 < snapshot.running <= 4


def test_without_a_total_nothing_is_foretold(adopt: Adopt) -> None:
    job = make_job(adopt(), ["a"], {})
    job.run()

    assert (job.snapshot().total, job.snapshot().left_s) == (None, None)


# -- many rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_rows_are_read_as_there_is_room_for_them(adopt: Adopt, alike: bool, prefixes: bool) -> None:
    core = adopt(lambda request: b"x", batch=2, prefixes=prefixes)
    outcomes: dict[int, Outcome] = {}
    most = 0

    def rows() -> Iterator[str]:
        nonlocal most
        for number in range(3000):
            most = max(most, number - len(outcomes))
            yield "a" if alike else str(number)

    make_job(core, rows(), outcomes).run()

    assert len(outcomes) == 3000
    assert most <= 300


def test_an_idle_engine_does_not_wait_for_rows_that_come_slowly(adopt: Adopt) -> None:
    core = adopt(prefixes=True)
    outcomes: dict[int, Outcome] = {}
    ended = []

    def rows() -> Iterator[str]:
        for number in range(12):
            time.sleep(0.05)
            ended.append(len(outcomes))
            yield str(number)

    make_job(core, rows(), outcomes).run()

    assert 0 < ended[-1] < len(outcomes) == 12


def test_a_job_that_is_paused_when_nothing_is_left_ends(adopt: Adopt) -> None:
    outcomes: dict[int, Outcome] = {}

    def pausing(request) -> Iterator[int]:
        yield ord("x")
        job.pause()

    core = adopt(pausing, step_s=0.01)
    job = make_job(core, ["a"], outcomes)
    job.run()

    assert outcomes[0].text == "x"
    assert job.snapshot().state == "finished"


def test_the_batch_stays_full(adopt: Adopt) -> None:
    core = adopt(lambda request: b"x" * 10, batch=4, step_s=0.003)
    run_job(core, map(str, range(120)))

    steps = core.get_stats()["steps_executed"]
    assert steps <= 1.15 * 120 * 12 / 4  # a prefill step, ten tokens and the end of each row
