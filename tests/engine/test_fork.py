"""A forked child has no engine: it says so, at once, and the parent's goes on."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

SETUP = """
import multiprocessing, sys, warnings
warnings.simplefilter("ignore")  # Python's own, of forking a process with threads
from mlx_nb import AsyncEngineCore, EngineCore, SamplingParams
from mlx_nb.backends.fake import fake_backend
from mlx_nb.session.session import default_session

engine = EngineCore(None, None, backend=fake_backend(step_s=0.001))
default_session().adopt("default", "fake", AsyncEngineCore.over(engine))
engine.wait_ready(10)

def attempt(how):
    try:
        return how()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def ask():
    return attempt(lambda: engine.generate_sync("abc", SamplingParams(max_tokens=3)).output_text)
"""

SAYS = "this process was forked from the one that runs the engine, which can't follow: use threads, or start"


def run(code: str) -> list[str]:
    """The lines that a new process prints."""
    done = subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_pool_of_forked_processes_gets_a_clear_error_and_the_parent_goes_on() -> None:
    lines = run(
        """
        request = engine.submit("abc", SamplingParams(max_tokens=300))
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(*pool.starmap(ask, [()] * 2), sep="\\n")
        print(ask())
        print(len(list(engine.stream_sync(request))) > 0)
        """
    )

    assert [line[: len(SAYS) + 15] for line in lines[:2]] == [f"EngineStopped: {SAYS}"] * 2
    assert lines[2:] == ["abc", "True"]


def test_everything_that_is_asked_in_a_child_answers_at_once() -> None:
    lines = run(
        """
        engine.submit("abc", SamplingParams(max_tokens=100000), "mine")

        def child():
            print(engine.state)
            print(attempt(lambda: default_session().get()))
            print(attempt(engine.clear_prefix_cache))
            print(engine.get_stats()["running"])
            engine.close()
            print(engine.state)
            sys.stdout.flush()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(20)
        print(process.exitcode, engine.state, engine.abort("mine"))
        """
    )

    assert lines[0] == "failed"
    assert lines[1].startswith(f"EngineNotStarted: {SAYS}")
    assert lines[2].startswith(f"EngineStopped: {SAYS}")
    assert lines[3:] == ["False", "closed", "0 running True"]
