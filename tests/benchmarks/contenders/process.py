"""A contender's own process: it loads a model, then does one piece of work after another, as it is told on stdin.

usage: python -m tests.benchmarks.contenders.process DRIVER

One JSON object a line comes in, ``{"call": name, …}``, and one goes out: ``{"result": …}`` or ``{"error": …}``. What
libraries print goes to stderr.
"""

import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlx_nb import __version__
from mlx_nb.backends import cpu_blas

BLAS = cpu_blas.prepare()

from ..work import Ask
from .driver import Driver

DRIVERS = {
    "floor": "mlx_lm:Floor",
    "batch_generate": "mlx_lm:BatchGenerate",
    "stream_generate": "mlx_lm:StreamGenerate",
    "by_hand": "mlx_lm:ByHand",
    "mlx_lm_server": "server:Server",
    "ours": "ours:Ours",
    "ours_simple": "ours:OursSimple",
    "vllm_mlx": "vllm_mlx:Engine",
    "vllm_mlx_simple": "vllm_mlx:Simple",
    "writer": "writer:Prompts",
}
PACKAGES = ("mlx", "mlx-lm", "transformers", "vllm-mlx")


def driver(name: str) -> Driver:
    """Import and make one."""
    module, _, attribute = DRIVERS[name].partition(":")
    made: Driver = getattr(importlib.import_module(f".{module}_driver", __package__), attribute)()
    return made


class Contender:
    """The calls that may come in."""

    def __init__(self, name: str) -> None:
        began = time.perf_counter()
        self._driver = driver(name)
        self._import_s = time.perf_counter() - began

    def load(self, folder: str, options: dict[str, Any]) -> dict[str, Any]:
        """Load the subject; say how long that took, and on what."""
        began = time.perf_counter()
        self._driver.load(Path(folder), options)
        return {
            "import_s": self._import_s,
            "load_s": time.perf_counter() - began,
            "versions": versions(),
            "device": device(),
            "gpu": on_gpu(),
            "blas": BLAS.status,
        }

    def prompts(self, kind: str, **options: Any) -> list[dict[str, Any]]:
        """Write prompts for everybody; the writer's call alone."""
        writer: Any = self._driver
        return [asdict(prompt) for prompt in writer.writer.write(kind, **options)]

    def run(self, asks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Do a piece of work."""
        answers = self._driver.run([Ask.read(ask) for ask in asks])
        return [asdict(answer) for answer in answers]

    def memory(self) -> dict[str, float]:
        """Return MiB: held now, the most there was, and on a GPU the most that MLX had there."""
        return self._driver.memory()

    def close(self) -> None:
        """End what the driver has started."""
        self._driver.close()


def versions() -> dict[str, str]:
    """Return those that figures depend on."""
    found = {"python": platform.python_version(), "mlx-nb": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device() -> str:
    """Return what MLX computes on, for people."""
    import mlx.core as mx

    info = mx.device_info()
    return str(info.get("device_name") or info.get("name") or mx.default_device())


def on_gpu() -> bool:
    """Whether MLX computes on one."""
    import mlx.core as mx

    return bool(mx.default_device().type != mx.DeviceType.cpu)


def main(name: str) -> None:
    """Serve until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    contender: Contender | None = None
    for line in sys.stdin:
        call = json.loads(line)
        try:
            contender = contender or Contender(name)
            method: Callable[..., Any] = getattr(contender, call.pop("call"))
            reply = {"result": method(**call)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        out.write(json.dumps(reply) + "\n")
        out.flush()
    if contender is not None:
        contender.close()


if __name__ == "__main__":
    main(sys.argv[1])
