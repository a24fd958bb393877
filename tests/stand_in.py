"""A server of OpenAI's API that answers as a test says, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]

VLLM = {"id": "tiny", "object": "model", "owned_by": "vllm", "max_model_len": 512}


def begin_stream(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.end_headers()


def send(handler: BaseHTTPRequestHandler, data: Any) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    handler.wfile.write(f"data: {text}\n\n".encode())
    handler.wfile.flush()


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish}
    return {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "tiny", "choices": [choice]}


def piece(chat: bool, text: str) -> dict[str, Any]:
    if chat:
        return chunk(content=text)
    return {**chunk(), "object": "text_completion", "choices": [{"index": 0, "text": text}]}


def says(
    *pieces: str, finish: str | None = "stop", every_s: float = 0.0, usage: dict[str, Any] | None = None
) -> Answer:
    """A stream of these texts; without `finish` it is cut off after them, in the middle of the answer."""

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        chat = "messages" in body
        begin_stream(handler)
        for text in pieces:
            send(handler, piece(chat, text))
            time.sleep(every_s)
        if finish is None:
            hang_up(handler)
            return
        last = chunk(finish)
        if not chat:
            last["choices"] = [{"index": 0, "text": "", "finish_reason": finish}]
        send(handler, last)
        if usage is not None:
            send(handler, {**last, "choices": [], "usage": usage})
        send(handler, "[DONE]")

    return answer


def streams(*chunks: Any) -> Answer:
    """A stream of these chunks, JSON or texts as they are."""

    def answer(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        begin_stream(handler)
        for each in chunks:
            send(handler, each)
        send(handler, "[DONE]")

    return answer


def fails(status: int, message: str = "no", **headers: str) -> Answer:
    """An error of the API."""

    def answer(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        reply(handler, status, {"error": {"message": message}}, headers)

    return answer


def hangs(seconds: float) -> Answer:
    """Nothing at all, for so long."""

    def answer(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        time.sleep(seconds)

    return answer


def page(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    """What a server that knows nothing of the API answers."""
    reply(handler, 200, "<html>Hello</html>", {"Content-Type": "text/html"})


def repeats(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """The prompt's last word, once more."""
    said = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    words = said.split()
    counts = {"prompt_tokens": len(words), "completion_tokens": 1, "total_tokens": len(words) + 1}
    says(words[-1], usage=counts)(handler, body)


def for_ever(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """A word every hundredth of a second, as long as somebody listens."""
    begin_stream(handler)
    while True:
        send(handler, piece("messages" in body, "again "))
        time.sleep(0.01)


def reply(
    handler: BaseHTTPRequestHandler, status: int, body: Any, headers: dict[str, str] | None = None
) -> None:
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    handler.send_response(status)
    for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Break the connection as a crash does."""
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


class StandIn:
    """The server.

    Parameters
    ----------
    answers : callable
        To the requests in turn; the last one goes on.
    models : sequence of dict
        What it lists.
    key : str, optional
        What it wants to be shown.

    Attributes
    ----------
    asked : list of dict
        Bodies of all requests.
    most : int
        Requests that it had at once, at most.
    left : int
        Streams whose reader went away.
    """

    def __init__(
        self,
        *answers: Answer,
        models: Sequence[dict[str, Any]] = (VLLM,),
        key: str | None = None,
        port: int = 0,
    ) -> None:
        self.answers, self.models, self.key = list(answers or (repeats,)), list(models), key
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most = self.now = self.left = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.port = port
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, again on the same port after `stop`."""
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def setup(self) -> None:
                super().setup()
                stand_in._open.add(self.connection)

            def do_GET(self) -> None:
                stand_in._list(self)

            def do_POST(self) -> None:
                stand_in._answer(self)

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """As if it were killed: no connection is left."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open.clear()

    def _allowed(self, handler: BaseHTTPRequestHandler) -> bool:
        shown = handler.headers.get("Authorization")
        self.keys.append(shown)
        if self.key is None or shown == f"Bearer {self.key}":
            return True
        reply(handler, 401, {"error": {"message": f"wrong key: {shown}"}})
        return False

    def _list(self, handler: BaseHTTPRequestHandler) -> None:
        if self._allowed(handler):
            reply(handler, 200, {"object": "list", "data": self.models})

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        if not self._allowed(handler):
            return
        with self._lock:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            self.asked.append(body)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            answer(handler, body)
        except OSError:
            self.left += 1
            handler.close_connection = True
        finally:
            with self._lock:
                self.now -= 1
