"""`mlx_lm.server` in a process of its own, asked over HTTP by a thread a request, and read as it streams."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ..work import Answer, Ask
from .driver import Driver, process_memory

HOST = "127.0.0.1"
READY_S = 300.0
SERVE = """\
import sys
from mlx_nb.backends import cpu_blas
cpu_blas.prepare()
from mlx_lm.server import main
sys.argv[0] = "mlx_lm.server"
main()
"""


class Server(Driver):
    """The server and its clients."""

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self._port = probe.getsockname()[1]
        rows = str(options.get("rows", 32))
        arguments = [
            "--model",
            str(folder),
            "--host",
            HOST,
            "--port",
            str(self._port),
            "--log-level",
            "ERROR",
        ]
        arguments += ["--decode-concurrency", rows]
        self._name = str(folder)
        self._server = subprocess.Popen([sys.executable, "-c", SERVE, *arguments], stdout=subprocess.DEVNULL)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if self._server.poll() is not None:
                raise RuntimeError(f"mlx_lm.server ended with status {self._server.returncode}")
            try:
                connection = http.client.HTTPConnection(HOST, self._port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("mlx_lm.server is not ready")

    def run(self, asks: list[Ask]) -> list[Answer]:
        answers = [Answer() for _ in asks]
        faults: list[BaseException] = []
        began = time.perf_counter()

        def one(ask: Ask, answer: Answer) -> None:
            try:
                time.sleep(max(0.0, ask.at - (time.perf_counter() - began)))
                self._one(ask, answer, began)
            except Exception as error:
                faults.append(error)

        threads = [threading.Thread(target=one, args=pair) for pair in zip(asks, answers, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        return answers

    def _one(self, ask: Ask, answer: Answer, began: float) -> None:
        body = {
            "model": self._name,
            "prompt": ask.prompt.text,
            "max_tokens": ask.new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection(HOST, self._port)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"mlx_lm.server said {response.status}: {response.read(500)!r}")
        texts = []
        for line in response:
            now = time.perf_counter() - began
            if ask.leaves is not None and now >= ask.leaves:
                break
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            piece = json.loads(line[len(b"data: ") :])
            if piece.get("usage"):
                answer.made = piece["usage"]["completion_tokens"]
            if piece["choices"] and (text := piece["choices"][0].get("text")):
                answer.times.append(now)
                texts.append(text)
        answer.end = time.perf_counter() - began
        answer.text = "".join(texts)
        answer.made = answer.made or len(answer.times)
        connection.close()

    def memory(self) -> dict[str, float]:
        return process_memory(self._server.pid)

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
