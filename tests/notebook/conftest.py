"""A real shell, without a kernel, with the extension loaded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shells
from IPython.core.interactiveshell import InteractiveShell

from mlx_nb import AsyncEngineCore, EngineConfig, EngineCore, ModelLoadError
from mlx_nb.backends.fake import fake_backend
from mlx_nb.session.session import default_session


@dataclass
class Ran:
    """What one cell did."""

    value: Any
    error: BaseException | None
    out: str
    err: str


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """An IPython shell that has run ``%load_ext mlx_nb``; its engines end with it."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = shells.begin()
    shell.run_line_magic("load_ext", "mlx_nb")
    yield shell
    shell.run_line_magic("unload_ext", "mlx_nb")
    default_session().stop_all(5)
    shells.end(shell)


@pytest.fixture
def run(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Ran]:
    """Run a cell in the shell."""

    def run_cell(code: str) -> Ran:
        capsys.readouterr()
        result = shell.run_cell(code, store_history=True)
        printed = capsys.readouterr()
        return Ran(result.result, result.error_before_exec or result.error_in_exec, printed.out, printed.err)

    return run_cell


@pytest.fixture
def adopt() -> Callable[..., EngineCore]:
    """Start a fake engine in the session; it answers with the prompt, for ever."""

    def start(name: str = "default", **options: Any) -> EngineCore:
        core = EngineCore(None, None, backend=fake_backend(**options))
        default_session().adopt(name, "fake", AsyncEngineCore.over(core))
        core.wait_ready(10)
        return core

    return start


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every MODEL is a fake, except "broken"; what an engine was started with is found under its model."""
    started: dict[str, Any] = {}

    def from_pretrained(model: str, config: EngineConfig, **options: Any) -> AsyncEngineCore:
        started[model] = (config, options)
        make = broken if model == "broken" else fake_backend(load_s=0.05)
        return AsyncEngineCore.over(EngineCore(None, None, config, backend=make))

    def broken(config: EngineConfig, on_progress: Any) -> Any:
        raise ModelLoadError("broken has no weights: download it again")

    monkeypatch.setattr(AsyncEngineCore, "from_pretrained", from_pretrained)
    return started
