"""Images on the lines of magics: what words stand for, and what a model is told that takes none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

Run = Callable[[str], Any]

CELLS = [
    "%%mlx_generate -i photo\nWhat is this?",
    "%mlx_generate -i photo What is this?",
    "%%mlx_chat -i photo\nWhat is this?",
    "%%mlx_generate --video frames\nWhat happens?",
    "mlx_nb.generate('What is this?', images=photo)",
    "mlx_nb.chat('What is this?', images=photo)",
    "mlx_nb.generate('What happens?', videos=[frames])",
    "await mlx_nb.agenerate('What is this?', images=photo)",
    "await mlx_nb.achat('What is this?', images=photo)",
    "table.mlx.generate('What is this?', images='photo')",
    "%%mlx_batch table --images photo\nWhat is this?",
]
MAGICS = [cell for cell in CELLS if cell.startswith("%")]


@pytest.fixture
def shell(shell: Any) -> Any:
    """The shell, with a picture in some variables."""
    import pandas as pd

    import mlx_nb

    photo = PIL.Image.new("RGB", (64, 32), "red")
    shell.push(
        {
            "mlx_nb": mlx_nb,
            "photo": photo,
            "frames": [photo, photo],
            "table": pd.DataFrame({"photo": [photo]}, dtype=object),
        }
    )
    return shell


@pytest.mark.parametrize("cell", CELLS)
def test_a_model_of_text_says_so_in_one_line_and_queues_nothing(run: Run, adopt: Any, cell: str) -> None:
    engine = adopt()

    ran = run(cell)

    assert str(
        ran.error
    ) == "fake takes text only: leave images out, or start a model that takes images".replace(
        "images", "videos" if "frames" in cell else "images"
    )
    assert engine.get_stats()["num_requests_processed"] == 0
    if cell in MAGICS:
        assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (
            "-i phto",
            "--image takes an image: a variable, a file or a URL, and there is no 'phto'; did you mean 'photo'?",
        ),
        ("-i no/such.png", "there is no file no/such.png"),
        ("-i 'no such.png'", "there is no file no such.png"),
        ("-i http://127.0.0.1/a.png", "127.0.0.1"),
        ("-i photo --raw", "--raw and --image exclude each other: leave one out"),
        ("--video no/such.mp4", "there is no file no/such.mp4"),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(run: Run, adopt: Any, line: str, refusal: str) -> None:
    adopt()

    ran = run(f"%%mlx_generate {line}\nWhat is this?")

    assert refusal in str(ran.error)
    assert "\n" not in str(ran.error)


def test_a_variable_goes_before_a_file_of_its_name(
    run: Run, adopt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo").write_bytes(b"no picture")

    assert "takes text only" in str(run("%%mlx_generate -i photo\nWhat is this?").error)

    run("del photo")
    assert "photo is no picture" in str(run("%%mlx_generate -i photo\nWhat is this?").error)
