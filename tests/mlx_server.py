"""A real mlx_lm.server on this machine, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

__all__ = ["MlxServer"]


class MlxServer:
    """The server of a model's folder; killed and started as a test likes, always on the same port.

    Parameters
    ----------
    work : Path
        A folder for its log, and in place of the cache that it would look through for models.
    """

    def __init__(self, model: Path, work: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._model, self._work = model, work
        (work / "hub").mkdir(exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, timeout: float = 120) -> None:
        """Start it and wait until it answers."""
        environment = {**os.environ, "HF_HUB_CACHE": str(self._work / "hub"), "HF_HUB_OFFLINE": "1"}
        command = [
            sys.executable,
            "-m",
            "mlx_lm.server",
            "--model",
            str(self._model),
            "--port",
            str(self.port),
        ]
        with (self._work / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--log-level", "WARNING"], env=environment, stdout=log, stderr=log
            )
        end = time.monotonic() + timeout
        while not self._answers():
            assert self._process.poll() is None, (self._work / "log").read_text()
            assert time.monotonic() < end, f"the server did not answer within {timeout} s"
            time.sleep(0.1)

    def kill(self) -> None:
        """End it at once, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False
