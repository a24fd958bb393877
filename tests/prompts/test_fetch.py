"""Downloads: what is refused, and what is bounded."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from mlx_nb import RequestError
from mlx_nb.prompts.fetch import fetch

LIMITS: dict[str, Any] = {"max_bytes": 1000, "timeout_s": 5}
Serve = Callable[[Callable[[BaseHTTPRequestHandler], None]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[BaseHTTPRequestHandler], None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def say(body: bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_body_is_read_where_private_addresses_are_allowed(serve: Serve) -> None:
    assert fetch(f"{serve(say(b'hello'))}/a%20b?c=d", allow_private=True, **LIMITS) == b"hello"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "[::ffff:127.0.0.1]",
     "2130706433", "[64:ff9b::7f00:1]", "0x7f.1", "100.64.0.1", "224.0.0.1"],
)  # fmt: skip
def test_private_addresses_are_refused_in_every_spelling(host: str) -> None:
    with pytest.raises(RequestError, match=r"not a public address|there is no host"):
        fetch(f"http://{host}/secret", **LIMITS)


def test_a_name_with_one_private_address_among_public_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(2, 1, 6, "", ("93.184.216.34", 80)), (2, 1, 6, "", ("10.0.0.7", 80))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RequestError, match=r"10\.0\.0\.7, which is not a public address"):
        fetch("http://example.test/", **LIMITS)


def test_a_second_answer_of_the_name_server_changes_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to the address that was checked."""
    port = int(serve(say(b"inside")).rpartition(":")[2])
    asked: list[str] = []

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        if len(asked) > 1:
            raise AssertionError("asked again")
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    real = socket.getaddrinfo
    monkeypatch.setattr(
        "socket.getaddrinfo",
        lambda host, *a, **k: resolve(host) if host == "rebind.test" else real(host, *a, **k),
    )
    assert fetch(f"http://rebind.test:{port}/", allow_private=True, **LIMITS) == b"inside"
    assert asked == ["rebind.test"]


def test_a_redirect_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    url = serve(say(b"", 302, Location="http://169.254.169.254/latest/meta-data"))
    from mlx_nb.prompts import fetch as module

    public = module._public
    monkeypatch.setattr(module, "_public", lambda address: address == "127.0.0.1" or public(address))
    with pytest.raises(RequestError, match=r"169\.254\.169\.254, which is not a public address"):
        fetch(url, **LIMITS)


def test_redirects_are_followed_and_counted(serve: Serve) -> None:
    def count_down(handler: BaseHTTPRequestHandler) -> None:
        left = int(handler.path.strip("/"))
        say(b"there")(handler) if not left else say(b"", 302, Location=f"/{left - 1}")(handler)

    url = serve(count_down)
    assert fetch(f"{url}/5", allow_private=True, **LIMITS) == b"there"
    with pytest.raises(RequestError, match="redirects more than 5 times"):
        fetch(f"{url}/6", allow_private=True, **LIMITS)
    with pytest.raises(RequestError, match="no http"):
        fetch(serve(say(b"", 302, Location="file:///etc/passwd")), allow_private=True, **LIMITS)
    with pytest.raises(RequestError, match="redirects to what is no URL"):
        fetch(serve(say(b"", 302, Location="http://[::1")), allow_private=True, **LIMITS)


def test_what_is_too_large_is_left_alone_whether_it_says_so_or_not(serve: Serve) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"x" * 512)
        except OSError:
            pass

    for answer in (say(b"x" * 2000), endless):
        with pytest.raises(RequestError, match="larger than 0 MB"):
            fetch(serve(answer), allow_private=True, **LIMITS)


HEADERS = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEADERS + b"Transfer-Encoding: chunked\r\n\r\n1"


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (HEADERS + b"X-Long: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (CHUNKED + b";", b"x"),
        (CHUNKED + b"\r\na\r\n0\r\n", b"X: y\r\n"),
    ],
    ids=["header", "continue", "chunk", "trailer"],
)
@pytest.mark.parametrize(("pause_s", "refusal"), [(0.05, "takes too long"), (0, "can't be read")])
def test_a_server_that_never_comes_to_an_end_is_given_up(
    serve: Serve, start: bytes, drop: bytes, pause_s: float, refusal: str
) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(start)
            until = time.monotonic() + 5
            while time.monotonic() < until:
                handler.wfile.write(drop if pause_s else drop * 1000)
                time.sleep(pause_s)

    began = time.monotonic()
    with pytest.raises(RequestError, match=refusal):
        fetch(serve(drip), max_bytes=1000, timeout_s=0.5 if pause_s else 10, allow_private=True)
    assert time.monotonic() - began < 3


def test_the_next_address_is_tried_where_one_does_not_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(serve(say(b"there")).rpartition(":")[2])
    real, found = socket.getaddrinfo, [(2, 1, 6, "", (f"127.0.0.{i}", port)) for i in (2, 1)]
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda host, *a, **k: found if host == "two.test" else real(host, *a, **k)
    )
    assert fetch(f"http://two.test:{port}/", allow_private=True, **LIMITS) == b"there"


def test_letters_outside_ascii_are_quoted_once(serve: Serve) -> None:
    def path(handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/moved":  # in UTF-8, as servers do
            return say(b"", 302, Location="/é".encode().decode("latin-1"))(handler)
        return say(handler.path.encode())(handler)

    assert fetch(f"{serve(path)}/é%20 b?q=ü&r=%C3%A4", allow_private=True, **LIMITS) == (
        b"/%C3%A9%20%20b?q=%C3%BC&r=%C3%A4"
    )
    assert fetch(f"{serve(path)}/moved", allow_private=True, **LIMITS) == b"/%C3%A9"


def test_a_slow_server_is_given_up(serve: Serve) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            for _ in range(100):
                handler.wfile.write(b"x")
                handler.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass

    for answer in (drip, lambda _: time.sleep(3)):
        began = time.monotonic()
        with pytest.raises(RequestError, match="takes too long"):
            fetch(serve(answer), max_bytes=1000, timeout_s=0.3, allow_private=True)
        assert time.monotonic() - began < 2


def test_answers_that_are_none(serve: Serve) -> None:
    url = serve(say(b"gone", 404))
    with pytest.raises(RequestError, match="answers 404") as caught:
        fetch(f"{url}/x?token=secret", allow_private=True, **LIMITS)
    assert "secret" not in str(caught.value)
    with pytest.raises(RequestError, match="answers 404") as caught:
        fetch(f"{url.replace('//', '//me:secret@')}/x", allow_private=True, **LIMITS)
    assert "secret" not in str(caught.value)
    for bad, message in [
        ("http:///path", "no http"),
        ("ftp://example.org/x", "no http"),
        ("http://host:notaport/", "no sound port"),
        ("http://no-such-host.invalid/", "there is no host"),
        ("http://[::1", "no http"),
        ("http://a..b/", "there is no host"),
        (f"http://{'a' * 300}.org/", "there is no host"),
    ]:
        with pytest.raises(RequestError, match=message):
            fetch(bad, allow_private=True, **LIMITS)
    with pytest.raises(RequestError, match="can't be read"):
        fetch("http://127.0.0.1:9/", allow_private=True, **LIMITS)


def test_data_urls() -> None:
    assert fetch("data:text/plain,a%20b", **LIMITS) == b"a b"
    assert fetch("DATA:text/plain;base64,aGVsbG8=", **LIMITS) == b"hello"
    with pytest.raises(RequestError, match="larger"):
        fetch("data:text/plain," + "x" * 3000, **LIMITS)
