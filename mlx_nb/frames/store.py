"""The checkpoint of jobs: outcomes in an SQLite file, by the digest of what was asked.

Owns the file's format and its damage. Holds digests and answers, no prompts. Writing goes on on a thread of its
own: what is put is committed within `FLUSH_S`, and then survives the end of the process. Several jobs, kernels and
processes may use one file at once.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import CheckpointError
from ..outputs import TokenLogprob
from .outcome import Outcome

__all__ = ["Store"]

log = logging.getLogger("mlx_nb")

APPLICATION = 0x6D6C786E
"""SQLite's mark of whose file it is: "mlxn"."""
VERSION = 1
FLUSH_S = 0.25
FLUSH_ROWS = 1024
BUSY_S = 5.0
"""Seconds to wait for another process that is writing."""
ASK_AT_ONCE = 512

CACHE_KIB = 8192
CHECKPOINT_PAGES = 4000
"""Pages of the write-ahead log that go into the file together: digests land on pages all over the index."""

# Rows one after the other and a small index of digests, not one tree of both: a quarter of the pages to write.
_SCHEMA = "CREATE TABLE outcomes (key BLOB NOT NULL UNIQUE, done INTEGER NOT NULL, outcome TEXT NOT NULL)"
_COLUMNS = [("key", "BLOB"), ("done", "INTEGER"), ("outcome", "TEXT")]


class Store:
    """Outcomes by key. Made by `open`; a context manager, usable from any thread.

    An outcome is done (the model answered) or failed; no other is kept.
    """

    def __init__(self, path: Path, reader: sqlite3.Connection, writer: sqlite3.Connection) -> None:
        self.path = path
        self._reader, self._writer = reader, writer
        self._reading = threading.Lock()
        self._changed = threading.Condition()
        self._pending: dict[bytes, Outcome] = {}
        self._writing: dict[bytes, Outcome] = {}
        self._flush_now = self._closing = self._complained = False
        self._thread = threading.Thread(target=self._write_on, name="mlx-checkpoint", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: str | Path) -> Store:
        """The store in a file, which is made if it isn't there.

        A file that is damaged, or is something else, is moved aside, and a warning says where to.

        Raises
        ------
        CheckpointError
            For a path that can't be written, a file that another process keeps locked, or a newer mlx_nb's.
        """
        path = Path(path).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return cls(path, _connect(path), _connect(path))
            except _Unfit as unfit:
                aside = _set_aside(path)
                log.warning(
                    "mlx_nb: %s %s: it is now %s, and a new checkpoint begins", path, unfit, aside.name
                )
                return cls(path, _connect(path), _connect(path))
        except (OSError, sqlite3.Error, _Unfit) as error:
            raise CheckpointError(
                f"the checkpoint {path} can't be used ({error}): {_advice(error)}"
            ) from error

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, key: bytes) -> Outcome | None:
        """The outcome under a key."""
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[bytes]) -> dict[bytes, Outcome]:
        """The outcomes there are under these keys."""
        wanted = list(keys)
        with self._changed:
            held = self._writing | self._pending if self._pending or self._writing else {}
        found = {key: held[key] for key in wanted if key in held}
        for start in range(0, len(wanted), ASK_AT_ONCE):
            some = wanted[start : start + ASK_AT_ONCE]
            marks = ",".join("?" * len(some))
            with self._reading:
                rows = self._reader.execute(
                    f"SELECT key, outcome FROM outcomes WHERE key IN ({marks})", some
                ).fetchall()
            for key, text in rows:
                if (outcome := _read(text)) is not None:
                    found.setdefault(key, outcome)
        return found

    def put(self, key: bytes, outcome: Outcome) -> None:
        """Keep a done or failed outcome, in place of an older one. Returns at once."""
        if not (outcome.answered or outcome.finish_reason == "error"):
            return
        with self._changed:
            self._pending[key] = outcome
            if len(self._pending) in (1, FLUSH_ROWS):
                self._changed.notify_all()

    def counts(self) -> tuple[int, int]:
        """How many outcomes are done, and how many failed."""
        self.flush()
        with self._reading:
            rows = self._reader.execute("SELECT done, COUNT(*) FROM outcomes GROUP BY done").fetchall()
        by_kind = dict(rows)
        return by_kind.get(1, 0), by_kind.get(0, 0)

    def flush(self) -> None:
        """Commit what was put, and wait for it."""
        with self._changed:
            self._flush_now = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._flush_now or not self._thread.is_alive(), 2 * BUSY_S)

    def close(self) -> None:
        """Commit what was put, and let go of the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._writer.close()
        with self._reading:
            self._reader.close()

    # -- the writing thread -----------------------------------------------------------------------------

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._flush_now or self._closing)
                self._changed.wait_for(
                    lambda: len(self._pending) >= FLUSH_ROWS or self._flush_now or self._closing, FLUSH_S
                )
                closing, self._writing, self._pending = self._closing, self._pending, {}
            written = self._write(self._writing)
            with self._changed:
                if not written:
                    self._pending = self._writing | self._pending
                self._writing = {}
                self._flush_now = False
                self._changed.notify_all()
            if closing:
                return
            if not written:
                time.sleep(FLUSH_S)

    def _write(self, outcomes: dict[bytes, Outcome]) -> bool:
        if not outcomes:
            return True
        rows = [(key, int(outcome.answered), _text(outcome)) for key, outcome in outcomes.items()]
        try:
            with self._writer:
                self._writer.executemany("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            if not self._complained:
                log.warning(
                    "mlx_nb: %d rows are not in the checkpoint %s yet (%s)", len(rows), self.path, error
                )
            self._complained = True
            return False
        self._complained = False
        return True


class _Unfit(Exception):
    """What is in a file's place is no store."""


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    try:
        _prepare(connection)
    except sqlite3.OperationalError:  # locked, read-only, no such folder: the file itself may be sound
        connection.close()
        raise
    except sqlite3.DatabaseError as error:
        connection.close()
        raise _Unfit(f"is damaged ({error})") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Have the tables in a new file, and know those of an old one."""
    (owner,), (version,) = (
        connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    new = owner == version == 0 and not tables
    if not new:
        if owner != APPLICATION:
            raise _Unfit("is no checkpoint of mlx_nb")
        if version > VERSION:
            raise CheckpointError(
                f"the checkpoint was written by a newer mlx_nb (format {version}, known is {VERSION}): "
                "update mlx_nb, or choose another file"
            )
        columns = [(row[1], row[2]) for row in connection.execute("PRAGMA table_info(outcomes)")]
        if columns != _COLUMNS:
            raise _Unfit("has other tables than a checkpoint")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise _Unfit(f"is damaged ({' '.join(verdict.split())})")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    if new:
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if not connection.execute("PRAGMA table_info(outcomes)").fetchall():  # another process was first
                connection.execute(_SCHEMA)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")


def _set_aside(path: Path) -> Path:
    """Rename a file, and what SQLite keeps beside it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + suffix))
    return aside


def _advice(error: Exception) -> str:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return "wait until the other process is done with it, or choose another file"
    return "choose another file"


_NAMES = [field.name for field in fields(Outcome)]


def _text(outcome: Outcome) -> str:
    known: dict[str, Any] = {name: value for name in _NAMES if (value := getattr(outcome, name)) is not None}
    if outcome.logprobs is not None:
        known["logprobs"] = [(one.token_id, one.logprob, list(one.top.items())) for one in outcome.logprobs]
    return json.dumps(known, separators=(",", ":"))


def _read(text: str) -> Outcome | None:
    """What `_text` wrote; None for anything else, which is then asked anew."""
    try:
        known = json.loads(text)
        if "logprobs" in known:
            known["logprobs"] = [
                TokenLogprob(token, value, dict(top)) for token, value, top in known["logprobs"]
            ]
        return Outcome(**known)
    except (ValueError, TypeError):
        return None
