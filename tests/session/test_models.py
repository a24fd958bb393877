"""What is on disk."""

from pathlib import Path

import huggingface_hub.constants
import platformdirs
import pytest
from models import make_folder

from mlx_nb.backends import sources
from mlx_nb.session.models import model_names, on_disk


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty caches, and a user without aliases."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MLX_NB_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(platformdirs, "user_config_dir", lambda name: str(tmp_path / "config"))


def in_hub_cache(root: Path, repo: str) -> Path:
    """The folder of a repository's one snapshot, as the Hub lays it out."""
    folder = root / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    return snapshot


def test_nothing_is_on_a_new_disk() -> None:
    assert on_disk() == []


def test_a_model_of_the_hub_has_its_size_precision_and_aliases(tmp_path: Path) -> None:
    folder = make_folder(in_hub_cache(tmp_path, "org/tiny"))
    sources.set_alias("short", "org/tiny")
    weights = (folder / "model.safetensors").stat().st_size

    (model,) = on_disk()

    assert (model.name, model.path, model.complete, model.aliases) == ("org/tiny", folder, True, ("short",))
    assert model.size == sum(file.stat().st_size for file in (tmp_path / "hub").rglob("*") if file.is_file())
    assert model.precision == "float32"
    assert model.memory is not None
    assert model.memory > 0.9 * weights


def test_content_that_a_snapshot_links_to_counts_once(tmp_path: Path) -> None:
    folder = make_folder(in_hub_cache(tmp_path, "org/tiny"))
    before = on_disk()[0].size
    blob = folder.parent.parent / "blobs" / "123"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)

    assert on_disk()[0].size == before


def test_an_interrupted_download_is_told(tmp_path: Path) -> None:
    snapshot = in_hub_cache(tmp_path, "org/half")
    (snapshot / "config.json").write_text("{}")
    (snapshot.parent.parent / "blobs" / "123.incomplete").write_bytes(b"w" * 1000)

    (model,) = on_disk()

    assert (model.name, model.complete, model.memory) == ("org/half", False, None)
    assert model.size >= 1000


def test_repositories_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    (in_hub_cache(tmp_path, "org/embeddings") / "weights.onnx").write_bytes(b"x")

    assert on_disk() == []


def test_a_converted_file_is_started_by_its_folder_and_the_demo_by_its_name(tmp_path: Path) -> None:
    demo = make_folder(tmp_path / "own" / "gguf" / "Smol.Q4_1-0123-float32-1")
    mine = make_folder(tmp_path / "own" / "gguf" / "mine-4567-float32-1")
    (tmp_path / "own" / "gguf" / ".half-8901").mkdir()
    (tmp_path / "own" / "demo").mkdir()
    (tmp_path / "own" / "demo" / "Smol.Q4_1.gguf").write_bytes(b"g" * 1000)

    found = {model.name: model for model in on_disk()}

    assert set(found) == {"demo", str(mine)}
    assert found["demo"].path == demo
    assert found["demo"].size == found[str(mine)].size + 1000


def test_names_to_choose_from_need_no_look_into_files(tmp_path: Path) -> None:
    in_hub_cache(tmp_path, "org/tiny")

    names = model_names()

    assert {"demo", "org/tiny", "qwen3-0.6b"} <= set(names)
    assert names == sorted(names)
