"""A checkpoint: the same call does only what is missing."""

from pathlib import Path

import pandas as pd
import pytest

import mlx_nb
from mlx_nb import GenerationInterrupted, RequestError

from .conftest import Adopt, question_of

SECONDS = ["queue_s", "ttft_s", "total_s"]


@pytest.fixture
def asked(adopt: Adopt) -> list[str]:
    """Return the questions that an engine gets; one that says "fail" fails the first time it is asked."""
    asked: list[str] = []

    def script(request):
        question = question_of(request)
        asked.append(question)
        if "fail" in question and asked.count(question) == 1:
            raise RuntimeError("the script failed")
        return question.upper().encode()

    adopt(script, batch=1)
    return asked


class Stop:
    """A value whose printing is an interrupt, once."""

    def __init__(self) -> None:
        self.stopped = False

    def __str__(self) -> str:
        if not self.stopped:
            self.stopped = True
            raise KeyboardInterrupt
        return "stop"


def generate(frame: pd.DataFrame, path: Path, **options) -> pd.DataFrame:
    return frame.mlx.generate("{{ word }}", checkpoint=path, progress=False, **options)


def test_an_interrupted_call_goes_on_where_it_was(asked: list[str], tmp_path: Path) -> None:
    words = [*(f"word {i}" for i in range(300)), Stop(), *(f"late {i}" for i in range(300)), None]
    frame = pd.DataFrame({"word": pd.Series(words, dtype=object)})

    with pytest.raises(GenerationInterrupted) as caught:
        generate(frame, tmp_path / "job")
    finished = len(caught.value.partial[caught.value.partial["state"] == "done"])
    before = len(asked)
    result = generate(frame, tmp_path / "job")
    again = generate(frame, tmp_path / "job")

    assert 0 < finished < 601
    assert len(asked) - before <= 602 - finished  # the one that was aborted is asked again
    assert len(asked) <= 602
    assert result["text"].tolist() == [*(str(word).upper() for word in words[:-1]), pd.NA]
    pd.testing.assert_frame_equal(again.drop(columns=SECONDS), result.drop(columns=SECONDS))
    assert caught.value.partial.columns.tolist() == result.columns.tolist()


def test_only_failed_rows_are_tried_again(asked: list[str], tmp_path: Path) -> None:
    frame = pd.DataFrame({"word": ["a", "fail", "c", None]})

    first = generate(frame, tmp_path / "job")
    kept = generate(frame, tmp_path / "job", retry=False)
    second = generate(frame, tmp_path / "job")

    assert asked == ["a", "fail", "c", "fail"]
    assert first["state"].tolist() == kept["state"].tolist() == ["done", "failed", "done", "skipped"]
    assert kept["error"].tolist()[1] == "RuntimeError: the script failed"
    assert second["state"].tolist() == ["done", "done", "done", "skipped"]
    assert second["text"].tolist() == ["A", "FAIL", "C", pd.NA]


async def test_what_is_asked_decides_what_is_missing(asked: list[str], tmp_path: Path) -> None:
    words = pd.Series(["a", "b"], name="word")
    path = tmp_path / "a folder" / "job"

    await words.mlx.agenerate(checkpoint=path, progress=False)
    words[::-1].mlx.generate(checkpoint=str(path), into="loud", progress=False)
    assert len(asked) == 2
    words.mlx.generate(checkpoint=path, max_tokens=1, progress=False)
    assert len(asked) == 4
    words.mlx.generate("{{ word }}!", checkpoint=path, progress=False)
    assert asked[4:] == ["a!", "b!"]
    words.mlx.generate(checkpoint=path, temperature=1, n=2, progress=False)
    words.mlx.generate(checkpoint=path, temperature=1, n=2, progress=False)
    assert len(asked) == 10
    words.mlx.generate(progress=False)
    assert len(asked) == 12


def test_checkpoints_keep_what_structure_is_read_from(adopt: Adopt, tmp_path: Path) -> None:
    asked = []
    adopt(lambda request: asked.append(1) or b'{"n": 3}', structured=True)
    words = pd.Series(["a"], name="word")

    results = [
        words.mlx.extract(
            {"type": "object", "properties": {"n": {"type": "integer"}}},
            checkpoint=tmp_path / "job",
            progress=False,
        )
        for _ in range(2)
    ]

    assert len(asked) == 1
    assert [result["n"].tolist() for result in results] == [[3], [3]]


def test_truncated_answers_are_kept_and_asked_anew_with_more_tokens(asked: list[str], tmp_path: Path) -> None:
    frame = pd.DataFrame({"word": ["a long one"]})

    first, again, longer = (generate(frame, tmp_path / "job", max_tokens=n) for n in (3, 3, 30))

    assert first["state"].tolist() == again["state"].tolist() == ["truncated"]
    assert longer["text"].tolist() == ["A LONG ONE"]
    assert len(asked) == 2


def test_a_checkpoint_that_cant_be_is_one_line(engine, tmp_path: Path) -> None:
    with pytest.raises(mlx_nb.MlxNbError, match="can't be used") as caught:
        pd.Series(["a"]).mlx.generate(checkpoint=tmp_path, progress=False)
    with pytest.raises(RequestError, match="retry is about what a checkpoint knows"):
        pd.Series(["a"]).mlx.generate(retry=False)
    for path in (True, ""):
        with pytest.raises(RequestError, match="checkpoint is the path of a file"):
            pd.Series(["a"]).mlx.generate(checkpoint=path)

    assert "\n" not in str(caught.value)
