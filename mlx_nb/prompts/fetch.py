"""Bytes from a URL that somebody wrote into a prompt: bounded in size and time, and not from inside the network.

Every address of the host is checked, and the connection goes to an address that was, so that a second answer of the
name server changes nothing. Knows nothing of what the bytes are.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import ipaddress
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from ..errors import RequestError

__all__ = ["fetch"]

REDIRECTS = 5
_AGENT = "mlx_nb"
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_BLOCK = 1 << 16
_AROUND = 1 << 20
"""Bytes that an answer may have besides its body: headers, sizes of chunks, trailers."""
_SAFE = "/%:=&?~+!$,;'@()*[]"
"""What is not quoted once more in a path or a query."""


def fetch(url: str, *, max_bytes: int, timeout_s: float, allow_private: bool = False) -> bytes:
    """The body at an http(s) URL, or of a ``data:`` URL.

    Parameters
    ----------
    timeout_s : float
        Seconds for all of it, redirects included.
    allow_private : bool
        Also addresses that are not public: this machine, the local network.

    Raises
    ------
    RequestError
        One line that says what is wrong.
    """
    if url.partition(":")[0].lower() == "data":
        return _inline(url, max_bytes)
    deadline = time.monotonic() + timeout_s
    seen = url
    for _ in range(REDIRECTS + 1):
        found = _ask(seen, max_bytes, deadline, allow_private)
        if isinstance(found, bytes):
            return found
        seen = found
    raise RequestError(f"{_short(url)} redirects more than {REDIRECTS} times")


def _ask(url: str, max_bytes: int, deadline: float, allow_private: bool) -> bytes | str:
    """The body, or where it is instead."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # brackets of no IPv6 address
        raise RequestError(f"{_short(url)} is no http(s) URL") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise RequestError(f"{_short(url)} is no http(s) URL")
    try:
        port = parts.port or _PORTS[parts.scheme]
    except ValueError:
        raise RequestError(f"{_short(url)} has no sound port") from None
    addresses = _addresses(parts.hostname, port, allow_private)
    connection = _connection(parts.scheme, parts.hostname, port, addresses, deadline)
    response: http.client.HTTPResponse | None = None
    try:
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.connect()
        connection.sock = _Timed(connection.sock, deadline, max_bytes + _AROUND)
        target = urllib.parse.quote(target, safe=_SAFE)
        connection.request("GET", target, headers={"User-Agent": _AGENT, "Accept": "*/*"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308) and response.headers.get("Location"):
            return _moved(url, response.headers["Location"])
        if response.status != 200:
            raise RequestError(f"{_short(url)} answers {response.status} {response.reason}")
        return _body(response, url, max_bytes)
    except RequestError:
        raise
    except TimeoutError:
        raise RequestError(f"{_short(url)} takes too long") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RequestError(f"{_short(url)} can't be read: {str(error) or type(error).__name__}") from error
    finally:
        if response is not None:  # an answer of unknown length has taken the socket over
            response.close()
        connection.close()


def _moved(url: str, location: str) -> str:
    place = location.encode("latin-1", "replace").decode(errors="replace")  # headers are read as latin-1
    try:
        return urllib.parse.urljoin(url, place)
    except ValueError:
        raise RequestError(f"{_short(url)} redirects to what is no URL") from None


def _addresses(host: str, port: int, allow_private: bool) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: labels that no name can have
        raise RequestError(f"there is no host {_cut(host)!r} ({error})") from error
    addresses = [str(info[4][0]) for info in found]
    for address in addresses:
        if not allow_private and not _public(address):
            raise RequestError(
                f"{host} is at {address}, which is not a public address: download it yourself, or allow private ones"
            )
    return addresses


def _public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    if ip in _NAT64:
        mapped = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.is_global and not ip.is_multicast and (mapped is None or _public(str(mapped)))


def _connection(
    scheme: str, host: str, port: int, addresses: list[str], deadline: float
) -> http.client.HTTPConnection:
    """A connection to one of the addresses that were checked, under the name that was asked for."""
    timeout = _left(deadline)
    made: Any
    if scheme == "https":
        made = http.client.HTTPSConnection(host, port, timeout=timeout, context=ssl.create_default_context())
    else:
        made = http.client.HTTPConnection(host, port, timeout=timeout)
    # The standard library's seam for this: connect() calls it with (host, port).
    made._create_connection = lambda *_: _connected(addresses, port, deadline)
    connection: http.client.HTTPConnection = made
    return connection


def _connected(addresses: list[str], port: int, deadline: float) -> socket.socket:
    """The first that answers: a name may have an IPv6 address where there is no IPv6."""
    for address in addresses[:-1]:
        try:
            return socket.create_connection((address, port), _left(deadline) / 2)
        except OSError:
            _left(deadline)
    return socket.create_connection((addresses[-1], port), _left(deadline))


class _Timed:
    """A socket whose every read ends at the deadline, and all of them within some bytes.

    A timeout of the socket itself is one for each read: a server that drips headers would hold a cell for ever.
    """

    def __init__(self, sock: socket.socket, deadline: float, most: int) -> None:
        self._sock, self._deadline, self._most = sock, deadline, most

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reads(self._sock.makefile("rb", buffering=0), self._again))

    def close(self) -> None:
        self._sock.close()

    def _again(self, read: int) -> None:
        self._most -= read
        if self._most < 0:
            raise OSError("it says more than a picture needs")
        self._sock.settimeout(_left(self._deadline))


class _Reads(io.RawIOBase):
    """The raw reads of a file, each announced with the number of bytes that came so far since the last."""

    def __init__(self, raw: Any, again: Callable[[int], None]) -> None:
        self._raw, self._again, self._read = raw, again, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._again(self._read)
        self._read = int(self._raw.readinto(buffer))
        return self._read

    def close(self) -> None:
        self._raw.close()
        super().close()


def _body(response: http.client.HTTPResponse, url: str, max_bytes: int) -> bytes:
    said = response.headers.get("Content-Length", "")
    if said.isdigit() and int(said) > max_bytes:
        raise _too_large(url, max_bytes)
    body = bytearray()
    while True:
        block = response.read1(_BLOCK)
        if not block:
            return bytes(body)
        body += block
        if len(body) > max_bytes:
            raise _too_large(url, max_bytes)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _inline(url: str, max_bytes: int) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise RequestError("a data: URL has its data after a comma")
    if len(data) > max_bytes * 4 / 3 + 4:
        raise _too_large("the data: URL", max_bytes)
    raw = urllib.parse.unquote_to_bytes(data)
    if not head.lower().endswith(";base64"):
        return raw
    try:
        return base64.b64decode(raw, validate=True)
    except binascii.Error as error:
        raise RequestError(f"the data: URL is not sound base64: {error}") from error


def _too_large(url: str, max_bytes: int) -> RequestError:
    return RequestError(f"{_short(url)} is larger than {max_bytes / 1e6:,.0f} MB")


def _short(url: str) -> str:
    """For messages: without what may be a secret."""
    scheme, slashes, rest = url.partition("?")[0].partition("//")
    owner, at, place = rest.partition("/")
    return _cut(scheme + slashes + owner.rpartition("@")[2] + at + place)


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:117]}…"
