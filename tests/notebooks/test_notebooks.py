"""Every notebook runs from top to bottom on the demo model, with its outputs in place."""

from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from models import tiny_folder
from vlm_models import tiny_vlm_folder

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

# What must be seen in the outputs of a notebook's cells, by a piece of the cell's source.
EXPECTED = {
    "01_first_steps": {
        "What is the capital of France?": ["The capital of France is Paris.", "7 tokens"],
        'countries["country"].mlx.generate': ["Tokyo", "Berlin", "skipped", "'country' is null"],
        "time.sleep(3)": ["tokens while the cell slept"],
        "%mlx_engine monitor": ["Engine monitor: SmolLM2-135M-Instruct"],
        "%mlx_engine stats": ["num_requests_processed"],
        "%mlx_engine stop": ["stopped"],
    },
    "02_asking_and_chatting": {
        "--stop . --logprobs": ["The capital of France is Paris\n", "7 tokens", " · stop"],
        "answer.finish_reason": ["'stop'", "TokenLogprob(token_id="],
        "--count": ["37"],
        "--schema city": ['"country": "Japan"'],
        "tokyo.parsed": ["'Japan'"],
        "--choices": ["positive", "1 token"],
        "--n 3": ["1 of 3 · ", "2 of 3 · ", "3 of 3 · "],
        "--bg": ["40 tokens"],
        "await story": ["this cell did not wait", "('length', 40)"],
        "%%mlx_chat paris -t 0 -n 24\nWhich river": ["Seine", "prompt tokens cached"],
        "--undo": ["taken back: Which river flows through it?", "people living in Paris"],
        "--show": ["2 turns saved to paris.json", "assistant: The capital of France is Paris.\n"],
        "--load": ["2 turns forgotten", "2 turns loaded from paris.json"],
        "capital.timings": ["The capital of Japan is Tokyo.", "ttft_s"],
        "asyncio.gather": ["Oslo", "Cairo", "Havana"],
        "mlx_nb.chat": ["(3, True, 34)"],
        "--temprature": ["UsageError: unknown option --temprature: did you mean --temperature?"],
        "%mlx_engine stop": ["stopped"],
    },
    "03_dataframes": {
        ".sample(24": ["Thailand", "Asia"],
        "countries.mlx.preview": [
            "ready",
            "24 answers, about ",
            "the time is unknown until the engine has run",
        ],
        "mlx.classify": ["guess_error", "Thailand"],
        "by chance": ["of 24 are right"],
        "mlx.score": ["best", "done"],
        "authors.mlx.extract": ["done"],
        "in every letter": ["of 8 are right in every letter"],
        "interrupt_after, args": ["aborted"],
        "again.equals": ["0 prompts were asked this time; the same answers: True"],
        "%mlx_engine stop": ["stopped"],
    },
    "04_images": {
        "%mlx_engine list": ["qwen2_vl", "running"],
        "What do you see?": ["[circle, 112 x 112]", "24 tokens"],
        "vision_misses": ["two questions, 1 look"],
        "-i circle -i square": ["[circle, 112 x 112]", "[square, 112 x 112]"],
        'images="picture"': ["truncated", "failed", "no picture in PNG"],
        "Which colour was it?": ["prompt tokens cached"],
        "%mlx_engine stop": ["stopped"],
    },
    "05_scaling_out": {
        "a row for each": ["Engine monitor: demo, idle"],
        "partitions=4": ["Paris", "Tokyo", "skipped", "'country' is null"],
        "before =": ["7"],
        "guesses": ["done", "7"],
        "%mlx_engine list": ["http://127.0.0.1:", "running"],
        "What is the capital of France?": ["12 tokens"],
        "head(2)": ["truncated"],
        "%mlx_engine stop": ["stopped"],
        "server.terminate": ["True"],
        "--distributed": ["python -m mlx_nb kernel -n 2"],
    },
}


def texts(cell: Any) -> str:
    """Return all that a cell shows as text."""
    shown = [
        output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs
    ]
    return "\n".join(shown)


@pytest.mark.model
@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_promises(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of models that see, none is small enough to be fetched here: a tiny random one stands in.
    monkeypatch.setenv("MLX_NB_VISION_MODEL", str(tiny_vlm_folder("qwen2_vl")))
    monkeypatch.setenv("MLX_NB_SERVED_MODEL", str(tiny_folder()))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    sound = [cell for cell in cells if "raises-exception" not in cell.metadata.get("tags", [])]
    assert not [
        o for cell in sound for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"
    ]
    for source, shown in EXPECTED[path.stem].items():
        cell = next(cell for cell in cells if source in cell.source)
        for text in shown:
            assert cell is not None, source
            assert text in texts(cell), source


def test_notebooks_are_kept_without_outputs() -> None:
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")], path
