"""Bytes from a URL that somebody wrote into a prompt: bounded in size and time, and not from inside the network.

Every address of the host is checked, and the connection goes to an address that was, so that a second answer of the
name server changes nothing. Knows nothing of what the bytes are.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
import time
import urllib.parse
from typing import Any

from ..errors import RequestError

__all__ = ["fetch"]

REDIRECTS = 5
_AGENT = "mlx_nb"
_PORTS = {"http": 80, "https": 443}
_BLOCK = 1 << 16


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
        seen = urllib.parse.urljoin(seen, found)
    raise RequestError(f"{_short(url)} redirects more than {REDIRECTS} times")


def _ask(url: str, max_bytes: int, deadline: float, allow_private: bool) -> bytes | str:
    """The body, or where it is instead."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise RequestError(f"{_short(url)} is no http(s) URL")
    try:
        port = parts.port or _PORTS[parts.scheme]
    except ValueError:
        raise RequestError(f"{_short(url)} has no sound port") from None
    address = _address(parts.hostname, port, allow_private)
    connection = _connection(parts.scheme, parts.hostname, port, address, deadline)
    response: http.client.HTTPResponse | None = None
    try:
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request("GET", target, headers={"User-Agent": _AGENT, "Accept": "*/*"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308) and response.headers.get("Location"):
            return str(response.headers["Location"])
        if response.status != 200:
            raise RequestError(f"{_short(url)} answers {response.status} {response.reason}")
        return _body(response, connection, url, max_bytes, deadline)
    except TimeoutError:
        raise RequestError(f"{_short(url)} takes too long") from None
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"{_short(url)} can't be read: {str(error) or type(error).__name__}") from error
    finally:
        if response is not None:  # an answer of unknown length has taken the socket over
            response.close()
        connection.close()


def _address(host: str, port: int, allow_private: bool) -> str:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RequestError(f"there is no host {host!r} ({error})") from error
    addresses = [str(info[4][0]) for info in found]
    for address in addresses:
        if not allow_private and not _public(address):
            raise RequestError(
                f"{host} is at {address}, which is not a public address: download it yourself, or allow private ones"
            )
    return addresses[0]


def _public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    return ip.is_global and not ip.is_multicast and (mapped is None or _public(str(mapped)))


def _connection(
    scheme: str, host: str, port: int, address: str, deadline: float
) -> http.client.HTTPConnection:
    """A connection to the address that was checked, under the name that was asked for."""
    timeout = _left(deadline)
    made: Any
    if scheme == "https":
        made = http.client.HTTPSConnection(host, port, timeout=timeout, context=ssl.create_default_context())
    else:
        made = http.client.HTTPConnection(host, port, timeout=timeout)
    # The standard library's seam for this: connect() calls it with (host, port).
    made._create_connection = lambda _, timeout, source: socket.create_connection(
        (address, port), timeout, source
    )
    connection: http.client.HTTPConnection = made
    return connection


def _body(
    response: http.client.HTTPResponse,
    connection: http.client.HTTPConnection,
    url: str,
    max_bytes: int,
    deadline: float,
) -> bytes:
    said = response.headers.get("Content-Length", "")
    if said.isdigit() and int(said) > max_bytes:
        raise _too_large(url, max_bytes)
    body = bytearray()
    while True:
        if connection.sock is not None:
            connection.sock.settimeout(_left(deadline))
        block = response.read1(_BLOCK)
        if not block:
            return bytes(body)
        body += block
        if len(body) > max_bytes:
            raise _too_large(url, max_bytes)
        _left(deadline)


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
    plain = url.partition("?")[0]
    return plain if len(plain) <= 120 else f"{plain[:117]}…"
