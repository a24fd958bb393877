"""A kernel over two processes, as Jupyter starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from models import tiny_folder

import mlx_nb

if TYPE_CHECKING:
    from kernel_session import KernelSession

pytestmark = [pytest.mark.kernel, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[KernelSession]":
    """A kernel that was installed and started over two processes."""
    from kernel_session import KernelSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(tmp_path_factory.mktemp("jupyter")))
        command = [sys.executable, "-m", "mlx_nb", "kernel", "-n", "2", "--install", "Parts"]
        subprocess.run(command, check=True, capture_output=True)
        session = KernelSession("parts")
        try:
            yield session
        finally:
            session.close()


def test_a_divided_model_answers_as_a_whole_one(session: "KernelSession") -> None:
    mlx_nb.start(tiny_folder(), name="whole")
    whole = mlx_nb.generate("Sphinx of black quartz", engine="whole", temperature=0, max_tokens=20).text
    mlx_nb.stop("whole")

    assert session.run("%load_ext mlx_nb").status == "ok"
    started = session.run(f"%mlx_engine start {tiny_folder()} --distributed", timeout=120)
    asked = "mlx_nb.generate('Sphinx of black quartz', temperature=0, max_tokens=20).text"
    session.run("import mlx_nb")

    assert started.status == "ok", started
    assert session.ask(asked) == whole


def test_interrupts_reach_the_kernel_and_not_the_launcher(session: "KernelSession") -> None:
    cell = session.send("%mlx_generate --max-tokens 3000 --ignore-eos Sphinx of black quartz")
    time.sleep(2)
    session.interrupt()
    cell.wait(20)

    assert session.ask("6 * 7") == 42
    assert session.ask("len(mlx_nb.generate('Sphinx', temperature=0, max_tokens=5).tokens)") == 5


def test_a_kernel_outlives_the_others_and_says_so(session: "KernelSession") -> None:
    session.run("kept = 'still here'")
    (victim,) = followers(session.ask("__import__('os').getppid()"))
    os.kill(victim, signal.SIGKILL)
    time.sleep(2)
    cell = session.run("%mlx_generate --max-tokens 5 Sphinx", timeout=60)
    again = session.run("%mlx_generate --max-tokens 5 Sphinx", timeout=60)

    assert cell.stderr.startswith("UsageError: ")
    assert "a process of the model has ended" in cell.stderr
    assert cell.stderr.count("\n") == 1
    assert again.stderr.startswith("UsageError: ")
    assert again.stderr.count("\n") == 1
    assert session.ask("kept") == "still here"


def followers(launcher: int) -> list[int]:
    """Return the launcher's processes that are not the first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == launcher and b"MLX_RANK=1" in environment:
            found.append(int(folder.name))
    return found
