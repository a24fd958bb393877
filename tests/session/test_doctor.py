"""What the doctor finds, and what it says to do."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from mlx_nb.backends import cpu_blas
from mlx_nb.session.doctor import Finding, examine, report

installed = importlib.metadata.version


def found(topic: str) -> list[Finding]:
    return [finding for finding in examine() if finding.topic == topic]


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None]) -> None:
    """Have other versions installed than there are; None is not installed."""

    def version(name: str) -> str:
        said = versions[name] if name in versions else installed(name)
        if said is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return said

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_this_installation_works() -> None:
    assert [finding for finding in examine() if finding.status == "problem"] == []


def test_a_version_that_does_not_fit_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"mlx-lm": "0.20.0", "pandas": None})

    (lm,), (pandas,) = found("mlx-lm"), found("pandas")

    assert lm.status == pandas.status == "problem"
    assert lm.text.startswith("0.20.0, but ")
    assert lm.fix.startswith("pip install 'mlx-lm<")
    assert (pandas.text, pandas.fix[:20]) == ("is missing", "pip install 'pandas<")


def test_what_only_notebooks_need_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"jupyterlab": None})

    (lab,) = found("jupyterlab")

    assert (lab.status, lab.fix) == ("note", "pip install 'mlx-nb[lab]'")


def test_two_back_ends_in_one_folder_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    pretend(monkeypatch, {"mlx-cpu": "1", "mlx-cuda-12": "1", "mlx-cuda-13": None, "mlx-metal": None})

    (backend,) = found("back end")

    assert backend.status == "problem"
    assert backend.fix.startswith("pip uninstall -y mlx-cpu mlx-cuda-12 mlx && pip install 'mlx-nb[cpu]'")


def test_no_back_end_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ImportError("MLX has no back end on this machine: pip install 'mlx-nb[cpu]'.")

    monkeypatch.setattr(cpu_blas, "require_backend", refuse)

    assert found("back end") == [
        Finding("back end", "problem", "MLX has no back end on this machine", "pip install 'mlx-nb[cpu]'.")
    ]


def test_a_slow_blas_is_a_note_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = cpu_blas.BlasReport(
        "missing", "No OpenBLAS found, so MLX is slow: apt install libopenblas0-pthread"
    )
    monkeypatch.setattr(cpu_blas, "prepare", lambda: slow)

    assert found("BLAS") == [
        Finding("BLAS", "note", "No OpenBLAS found, so MLX is slow", "apt install libopenblas0-pthread")
    ]


def test_offline_mode_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    assert found("Hub")[0].fix == "unset HF_HUB_OFFLINE"


def test_a_report_has_a_line_each_and_what_to_do_below() -> None:
    text = report([Finding("a", "ok", "fine"), Finding("long", "problem", "is missing", "install it")])

    assert text == "✓ a     fine\n✗ long  is missing\n        → install it"


def test_the_command_line_prints_it_and_fails_on_a_problem(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlx_nb", "doctor"]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    fine = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=50)
    (tmp_path / "file").touch()
    environment |= {"MLX_NB_CACHE": str(tmp_path / "file" / "cache")}
    bad = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=50)

    assert (fine.returncode, bad.returncode) == (0, 1)
    assert "✓ mlx-nb" in fine.stdout
    assert "file/cache can't be written" in bad.stdout
