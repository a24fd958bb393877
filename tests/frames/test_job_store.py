"""Jobs with a checkpoint: a rerun does what is missing, and gives what an undisturbed run gives."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_nb import EngineConfig, EngineCore, SamplingParams, SchedulerConfig
from mlx_nb.backends.fake import fake_backend
from mlx_nb.frames.job import Outcome
from mlx_nb.frames.store import Store

from .conftest import Adopt, prompt_of
from .jobs import GREEDY, make_job, run_job

HOT = SamplingParams(temperature=1.0, max_tokens=20)


class Counted:
    """A script that counts how often each prompt was run, and fails while it is told to."""

    def __init__(self, fail: bool = False) -> None:
        self.runs: Counter[str] = Counter()
        self.fail = fail

    def __call__(self, request) -> bytes:
        self.runs[prompt_of(request)] += 1
        if self.fail and "fail" in prompt_of(request):
            raise RuntimeError("the script failed")
        return f"{prompt_of(request).upper()} {self.runs.total()}".encode()


def through(path: Path, core: EngineCore, prompts, *args, **options) -> list[Outcome]:
    """Return the outcomes of a job with a checkpoint."""
    with Store.open(path) as store:
        return run_job(core, prompts, *args, store=store, **options)


def test_a_rerun_asks_nothing_again(adopt: Adopt, tmp_path: Path) -> None:
    script = Counted()
    core = adopt(script)
    prompts = [*"abcdefghij", *"abc"]

    first = through(tmp_path / "rows.db", core, prompts)
    second = through(tmp_path / "rows.db", core, prompts)

    assert second == first
    assert set(script.runs.values()) == {1}


def test_more_rows_and_other_rows_run(adopt: Adopt, tmp_path: Path) -> None:
    script = Counted()
    core = adopt(script)
    through(tmp_path / "rows.db", core, "abc")

    outcomes = through(tmp_path / "rows.db", core, "xcbyaz")

    assert script.runs == dict.fromkeys("abcxyz", 1)
    assert [outcome.text[0] for outcome in outcomes] == list("XCBYAZ")


def test_jobs_of_one_file_dont_mix(adopt: Adopt, tmp_path: Path) -> None:
    core = adopt(lambda request: f"{request.params.max_tokens}{prompt_of(request)}".encode())

    for _ in range(2):
        short = through(tmp_path / "rows.db", core, "ab", GREEDY.but(max_tokens=3))
        long = through(tmp_path / "rows.db", core, "ab", GREEDY.but(max_tokens=9))
        other = through(tmp_path / "rows.db", core, ["a!", "b!"], GREEDY.but(max_tokens=3))
        assert [outcome.text for outcome in (*short, *long, *other)] == ["3a", "3b", "9a", "9b", "3a!", "3b!"]


def test_failed_rows_are_retried_unless_told_otherwise(adopt: Adopt, tmp_path: Path) -> None:
    script = Counted(fail=True)
    core = adopt(script)
    through(tmp_path / "rows.db", core, ["a", "fail"])
    script.fail = False

    left = through(tmp_path / "rows.db", core, ["a", "fail"], retry_failed=False)
    retried = through(tmp_path / "rows.db", core, ["a", "fail"])

    assert [outcome.finish_reason for outcome in left] == ["stop", "error"]
    assert [outcome.finish_reason for outcome in retried] == ["stop", "stop"]
    assert script.runs == {"a": 1, "fail": 2}
    assert through(tmp_path / "rows.db", core, ["a", "fail"], retry_failed=False) == retried


def test_a_stopped_engine_is_no_rows_failure(adopt: Adopt, tmp_path: Path) -> None:
    def script(request) -> bytes:
        if prompt_of(request) == "20":
            core.stop_soon()
        return b"x"

    core = adopt(script, batch=2)
    outcomes = through(tmp_path / "rows.db", core, map(str, range(100)))

    assert {outcome.finish_reason for outcome in outcomes} == {"stop", "error"}
    with Store.open(tmp_path / "rows.db") as store:
        done, failed = store.counts()
    assert done == sum(outcome.finish_reason == "stop" for outcome in outcomes)
    assert failed == 0


def test_samples_drawn_afresh_come_back_each_in_its_place(adopt: Adopt, tmp_path: Path) -> None:
    script = Counted()
    core = adopt(script, batch=1)

    first = through(tmp_path / "rows.db", core, ["a", "b", "a", "a"], HOT)
    more = through(tmp_path / "rows.db", core, ["a", "b", "a", "a", "a"], HOT)

    assert more[:4] == first
    assert len({outcome.text for outcome in more}) == 5
    assert script.runs == {"a": 4, "b": 1}


def test_rows_with_logits_processors_stay_out_of_the_checkpoint(adopt: Adopt, tmp_path: Path) -> None:
    through(
        tmp_path / "rows.db", adopt(), "ab", GREEDY.but(logits_processors=[lambda tokens, logits: logits])
    )

    with Store.open(tmp_path / "rows.db") as store:
        assert store.counts() == (0, 0)


@pytest.mark.parametrize("prefixes", [False, True])
def test_a_stopped_job_goes_on_where_it_was(tmp_path: Path, prefixes: bool) -> None:
    script = Counted()
    config = EngineConfig(
        scheduler_config=SchedulerConfig(completion_batch_size=4, enable_prefix_cache=prefixes)
    )
    core = EngineCore(None, None, config, backend=fake_backend(script, step_s=0.0005))
    core.launch()
    core.wait_ready()
    prompts = [f"{'the same for all ' * 5}{number}" for number in range(400)]
    with Store.open(tmp_path / "rows.db") as store:
        job = make_job(core, prompts, {}, GREEDY.but(max_tokens=120), store=store)
        thread = threading.Thread(target=job.run)
        thread.start()
        while job.snapshot().done < 100:
            time.sleep(0.002)
        job.stop()
        thread.join()
        assert store.counts() == (job.snapshot().done, 0)
        outcomes: dict[int, Outcome] = {}
        resumed = make_job(core, prompts, outcomes, GREEDY.but(max_tokens=120), store=store)
        resumed.run()

    assert resumed.snapshot().reused == job.snapshot().done < 400
    assert [outcomes[row].text.split()[-2] for row in range(400)] == [str(row) for row in range(400)]
    core.close()


# -- a process that is killed -----------------------------------------------------------------------------------

ROWS = 200
PACE_S = 0.03
"""Seconds between two rows of the process that is killed, so that it is killed in time."""


def whole_job(path: Path, kind: str, pace_s: float = 0.0) -> list[str]:
    """Return what the rows answered."""
    config = EngineConfig(scheduler_config=SchedulerConfig(completion_batch_size=4))
    if kind == "fake":
        script = lambda request: b"yes: " + bytes(request.prompt_token_ids[-4:])  # noqa: E731
        core = EngineCore(None, None, config, backend=fake_backend(script))
    else:
        from models import tiny

        core = EngineCore(*tiny(kind), config)
    core.launch()
    core.wait_ready()

    def prompts() -> Iterator[str]:
        for row in range(ROWS):
            time.sleep(pace_s)
            yield f"{'What is to be said of number ' * 4}{row}?"

    try:
        with Store.open(path) as store:
            return [
                f"{outcome.finish_reason} {outcome.text!r}"
                for outcome in run_job(core, prompts(), store=store)
            ]
    finally:
        core.close()


@pytest.mark.parametrize("kind", ["fake", "qwen3_5"])
def test_killed_and_run_again_gives_what_an_undisturbed_run_gives(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.db"
    with subprocess.Popen(
        [sys.executable, "-c", _CODE, str(path), kind], cwd=Path(__file__).parents[2]
    ) as process:
        deadline = time.monotonic() + 60
        while committed(path) < 10 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    kept = committed(path)

    resumed = whole_job(path, kind)

    assert 10 <= kept < ROWS
    assert committed(path) == ROWS
    assert resumed == whole_job(tmp_path / "other.db", kind)


_CODE = f"""
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from frames.test_job_store import whole_job
whole_job(Path(sys.argv[1]), sys.argv[2], {PACE_S})
"""


def committed(path: Path) -> int:
    """Return how many rows are in a checkpoint now."""
    if not path.exists():
        return 0
    with Store.open(path) as store:
        return store.counts()[0]
