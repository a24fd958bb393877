"""A real kernel to run cells in, and what came out of each cell."""

from __future__ import annotations

import ast
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.manager import KernelManager
from jupyter_core.utils import ensure_event_loop

ENGINE = """\
import asyncio, time
from mlx_nb import AsyncEngineCore, EngineCore
from mlx_nb.backends.fake import fake_backend
from mlx_nb.session.session import default_session

def adopt(name="default", step_s=0.01, **options):
    backend = fake_backend(step_s=step_s, **options)
    engine = EngineCore(None, None, backend=backend)
    default_session().adopt(name, "fake", AsyncEngineCore.over(engine))
    return engine

engine = adopt()
"""


@dataclass
class Cell:
    """What one executed cell has shown so far."""

    status: str = ""
    reply: dict[str, Any] = field(default_factory=dict)
    error: tuple[str, str] = ("", "")
    traceback: list[str] = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    displays: list[dict[str, str]] = field(default_factory=list)
    drawn_at: list[float] = field(default_factory=list)
    replied: threading.Event = field(default_factory=threading.Event)
    idle: threading.Event = field(default_factory=threading.Event)
    done_at: float = 0.0

    @property
    def texts(self) -> list[str]:
        """The displays as plain text, as they are now."""
        return [data["text/plain"] for data in self.displays]

    def wait(self, timeout: float = 20) -> Cell:
        assert self.replied.wait(timeout), f"the cell did not end within {timeout} s: {self}"
        assert self.idle.wait(timeout)
        return self


def eventually(condition: Callable[[], Any], timeout: float = 10) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
    return value


class KernelSession:
    """A kernel of its own process."""

    def __init__(self, name: str = "python3") -> None:
        self._manager = KernelManager(kernel_name=name)
        self._manager.start_kernel()
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=30 if name == "python3" else 120)
        self._cells: dict[str, Cell] = {}
        self._places: dict[str, tuple[Cell, int]] = {}
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, args=(get, take), daemon=True)
            for get, take in [
                (self._client.iopub_channel.get_msg, self._take_output),
                (self._client.shell_channel.get_msg, self._take_reply),
            ]
        ]
        for thread in self._threads:
            thread.start()

    def send(self, code: str, **header: Any) -> Cell:
        """Submit a cell and don't wait for it."""
        cell = Cell()
        content = {"code": code, "silent": False, "store_history": True, "stop_on_error": True}
        message = self._client.session.msg("execute_request", content)
        message["header"].update(header)
        self._cells[message["header"]["msg_id"]] = cell
        self._client.shell_channel.send(message)
        return cell

    def run(self, code: str, timeout: float = 20) -> Cell:
        """Run a cell to its end, however that is."""
        return self.send(code).wait(timeout)

    def ask(self, expression: str) -> Any:
        """The value of an expression made of plain literals."""
        cell = self.run(f"print(repr({expression}))")
        assert cell.status == "ok", cell
        return ast.literal_eval(cell.stdout)

    def complete(self, code: str) -> list[str]:
        """What Tab offers at the end of the code."""
        cell = Cell()
        message = self._client.session.msg("complete_request", {"code": code, "cursor_pos": len(code)})
        self._cells[message["header"]["msg_id"]] = cell
        self._client.shell_channel.send(message)
        return list(cell.wait().reply["matches"])

    def interrupt(self) -> float:
        """Send SIGINT; the time it was sent."""
        self._manager.interrupt_kernel()
        return time.monotonic()

    def new_subshell(self) -> str:
        """A subshell's id, for the header of `send`."""
        message = self._client.session.msg("create_subshell_request", {})
        self._client.control_channel.send(message)
        reply = self._client.control_channel.get_msg(timeout=10)
        return str(reply["content"]["subshell_id"])

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(5)
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
        self._client.context.destroy(linger=0)
        ensure_event_loop().close()  # jupyter_client's, for its synchronous methods

    def _listen(self, get: Callable[..., Any], take: Callable[[Cell, str, Any], None]) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(queue.Empty):
                message = get(timeout=0.2)
                cell = self._cells.get(message["parent_header"].get("msg_id", ""))
                if cell is not None:
                    take(cell, message["msg_type"], message["content"])

    @staticmethod
    def _take_reply(cell: Cell, _type: str, content: Any) -> None:
        cell.status, cell.reply, cell.done_at = content["status"], content, time.monotonic()
        cell.replied.set()

    def _take_output(self, cell: Cell, kind: str, content: Any) -> None:
        match kind:
            case "stream":
                setattr(cell, content["name"], getattr(cell, content["name"]) + content["text"])
            case "execute_result":
                cell.value = content["data"]["text/plain"]
            case "display_data":
                cell.displays.append(content["data"])
                if "display_id" in content["transient"]:
                    self._places[content["transient"]["display_id"]] = (cell, len(cell.displays) - 1)
            case "update_display_data":
                place, index = self._places[content["transient"]["display_id"]]
                place.displays[index] = content["data"]
                place.drawn_at.append(time.monotonic())
            case "error":
                cell.error, cell.traceback = (content["ename"], content["evalue"]), content["traceback"]
            case "status" if content["execution_state"] == "idle":
                cell.idle.set()
