"""A model behind mlx_lm.server answers as it does in this process, whatever happens to the server."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("openai")

from mlx_server import MlxServer
from models import tiny_folder

import mlx_nb
from mlx_nb.session.session import default_session

pytestmark = pytest.mark.slow

ROWS = 200
FRAME = pd.DataFrame({"n": range(ROWS), "what": ["words", "numbers", "names", "stones"] * (ROWS // 4)})
TEMPLATE = "Give me {{ n }} {{ what }}."
GREEDY = {"temperature": 0, "max_tokens": 12, "progress": False}


def as_served(text: str) -> str:
    """A text as mlx-lm streams it: without a space at its beginning, a null byte as its vocabulary spells it."""
    return text.removeprefix(" ").replace("\0", "Ā")


@pytest.fixture(scope="module")
def local() -> Iterator[pd.DataFrame]:
    """The rows, answered in this process."""
    mlx_nb.start(tiny_folder(), name="local")
    frame = mlx_nb.generate_frame(FRAME, TEMPLATE, engine="local", **GREEDY)
    yield frame.assign(text=frame.text.map(as_served))
    default_session().stop_all(10)


@pytest.fixture
def remote(mlx_server: MlxServer, local: pd.DataFrame) -> Iterator[str]:
    """The name of an engine that drives the server."""
    mlx_nb.connect(mlx_server.url, name="remote", patience_s=60)
    yield "remote"
    mlx_nb.stop("remote")


def test_the_only_model_is_taken_and_known_by_its_folder(remote: str) -> None:
    info = mlx_nb.current_engine(remote).engine.info

    assert info.name == tiny_folder().name
    assert info.backend.endswith("/v1 (mlx-lm)")


def test_questions_and_conversations_are_answered_alike(remote: str) -> None:
    answers, talks = [], []
    for name in ("local", remote):
        answers.append(mlx_nb.generate("What is a sphinx?", engine=name, temperature=0, max_tokens=16))
        talk = mlx_nb.Conversation("Be brief.")
        for question in ("Name a colour.", "Another?"):
            mlx_nb.chat(question, talk, engine=name, temperature=0, max_tokens=8)
        talks.append([as_served(turn.answer) for turn in talk.turns])

    ours, theirs = answers
    assert as_served(ours.text) == theirs.text
    assert (ours.prompt_tokens, ours.finish_reason) == (theirs.prompt_tokens, theirs.finish_reason)
    assert talks[0] == talks[1]


def test_two_hundred_rows_are_answered_alike(remote: str, local: pd.DataFrame) -> None:
    frame = mlx_nb.generate_frame(FRAME, TEMPLATE, engine=remote, **GREEDY)

    assert list(frame.text) == list(local.text)
    assert list(frame.state) == list(local.state)
    assert list(frame.prompt_tokens) == list(local.prompt_tokens)


def test_a_server_killed_in_the_middle_of_a_job_is_waited_for(
    mlx_server: MlxServer, remote: str, local: pd.DataFrame
) -> None:
    core = mlx_nb.current_engine(remote).engine

    def restart() -> None:
        while core.get_stats()["num_requests_processed"] < ROWS // 10:
            time.sleep(0.01)
        mlx_server.kill()
        time.sleep(1)
        mlx_server.start()

    before = core.get_stats()["num_requests_processed"]
    assert before < ROWS // 10
    thread = threading.Thread(target=restart)
    thread.start()
    frame = mlx_nb.generate_frame(FRAME, TEMPLATE, engine=remote, **GREEDY)
    thread.join()

    assert list(frame.text) == list(local.text)
    assert core.get_stats()["remote"]["retries"] > 0


def test_rows_that_a_dead_server_left_are_done_by_the_next_run(
    mlx_server: MlxServer, local: pd.DataFrame, tmp_path: Path
) -> None:
    mlx_nb.connect(mlx_server.url, name="impatient", patience_s=0.5)
    core = mlx_nb.current_engine("impatient").engine
    options = {"engine": "impatient", "checkpoint": tmp_path / "rows.db", **GREEDY}

    def kill() -> None:
        while core.get_stats()["num_requests_processed"] < ROWS // 4:
            time.sleep(0.01)
        mlx_server.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    began = time.monotonic()
    first = mlx_nb.generate_frame(FRAME, TEMPLATE, **options)
    took = time.monotonic() - began
    thread.join()
    mlx_server.start()
    done = core.get_stats()["num_requests_processed"]
    second = mlx_nb.generate_frame(FRAME, TEMPLATE, **options)
    asked_again = core.get_stats()["num_requests_processed"] - done
    mlx_nb.stop("impatient")

    failed = first[first.state == "failed"]
    assert 0 < len(failed) < ROWS
    assert failed.error.str.contains("can't be reached|was lost").all()
    assert took < 60
    assert list(second.text) == list(local.text)
    assert asked_again == len(failed)
