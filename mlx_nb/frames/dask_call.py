"""A call of `generate_frame` on the workers of a Dask cluster.

Owns how a frame becomes partitions, and how what they give becomes a frame again: one of pandas (or Polars) is made
here of the outcomes, as a local call makes it; one of Dask stays with the workers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from ..engine.interrupts import ends_the_loop, interruptible
from ..errors import CheckpointError, RequestError
from ..validation import integer
from .dask_job import ClusterJob, new_name
from .dask_workers import check_client, client_in_use, start_workers
from .generate import Plan, is_dask
from .progress import Progress, shown
from .results import GenerationCancelled, GenerationInterrupted
from .snapshot import Snapshot

__all__ = ["ClusterCall"]

EACH = 3
"""Partitions for each worker: enough that one who is done early helps the others."""
LEAST = 16
"""Rows of a partition, at the least: a batch should have something to do."""
MANIFEST = "partitions.json"
"""How a checkpoint's rows were cut: with other cuts its files would be of other rows."""
OF_FRAMES = ("into", "join", "parsed")
"""Options that only say how outcomes become a frame."""


class ClusterCall:
    """A call on the engines of a cluster; runs once.

    Parameters
    ----------
    client : distributed.Client, optional
        The one in use, if none is given.
    model : str, optional
        That the workers run or are to start; this process's, if they run none.
    partitions : int, optional
        The other parameters are those of `Plan`.
    """

    def __init__(
        self,
        data: Any,
        template: str | None = None,
        *,
        client: Any = None,
        partitions: int | None = None,
        engine: str | None = None,
        model: str | None = None,
        checkpoint: str | Path | None = None,
        progress: Progress = True,
        **options: Any,
    ) -> None:
        self._client = client_in_use() if client is None else client
        check_client(self._client)
        if engine is not None:
            raise RequestError("engine names one of this process: leave it out, or the client")
        dask = is_dask(data)
        if partitions is not None:
            if dask:
                raise RequestError("a Dask frame has partitions: repartition() it, and leave partitions out")
            integer("partitions", partitions, low=1)
        meta = data._meta if dask else data
        plan = Plan(meta, template, checkpoint=checkpoint, progress=progress, **options)
        self._folder = None if checkpoint is None else Path(checkpoint).expanduser().absolute()
        self._model, self._progress, self._title = model, progress, plan.title
        self._stopped = False
        self._job: ClusterJob | None = None
        ask = (template, options, None if self._folder is None else str(self._folder))
        self._work: _Work = (
            _OfDask(self._client, plan, ask, data) if dask else _OfPandas(self._client, plan, ask, partitions)
        )

    def run(self) -> Any:
        """The result, blocking."""
        try:
            self._run()
        except KeyboardInterrupt:
            kind = GenerationCancelled if ends_the_loop() else GenerationInterrupted
            raise kind(self._work.result(), *self._work.counts()) from None
        return self._work.result()

    async def arun(self) -> Any:
        """The result, awaited: this process's part of the work has a thread of its own."""
        work = asyncio.ensure_future(asyncio.to_thread(self._run))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._stopped = True
            if self._job is None:  # the workers are still being started
                raise
            self._job.stop()
            await asyncio.wait([work])
            raise GenerationCancelled(self._work.result(), *self._work.counts()) from None
        return self._work.result()

    def _run(self) -> None:
        if self._folder is not None:
            _make(self._folder)
        with interruptible():
            start_workers(self._client, self._model)
            job = self._work.job(self._folder)
        self._job = job
        if self._stopped:
            job.stop()
        with shown(job, self._progress, core=None, title=self._title):
            job.run()


class _Work(Protocol):
    """A frame on its way to the workers and back."""

    def job(self, folder: Path | None) -> ClusterJob:
        """What runs it."""

    def result(self) -> Any:
        """The frame, as far as there is one."""

    def counts(self) -> tuple[int, int]:
        """How many answers are finished, of how many."""


Ask = tuple[str | None, Mapping[str, Any], str | None]
"""Template, options, and folder of the checkpoint."""


class _OfPandas:
    """Cut into partitions; their outcomes are put where the rows are, and make the frame a local call makes."""

    def __init__(self, client: Any, plan: Plan, ask: Ask, partitions: int | None) -> None:
        self._client, self._plan, self._ask, self._partitions = client, plan, ask, partitions
        self._results = plan.results()
        self._cuts: list[int] = []

    def job(self, folder: Path | None) -> ClusterJob:
        """What runs it."""
        from .dask_worker import Order, run_part

        data, rows = self._plan.data, len(self._plan.rows)
        if isinstance(data, pd.DataFrame) and data.columns.nlevels == 1:
            data = data[self._plan.rows.needed]
        count = self._count(rows, folder)
        cuts = self._cuts = [rows * number // max(1, count) for number in range(count + 1)]
        template, options, path = self._ask
        options = {name: value for name, value in options.items() if name not in OF_FRAMES}
        order = Order(new_name(), template, options, path, framed=False)

        def submit(number: int) -> Any:
            piece = data.iloc[cuts[number] : cuts[number + 1]]
            return self._client.submit(
                run_part, piece, number, order, key=f"{order.job}-{number}", pure=False
            )

        return ClusterJob(self._client, count, submit, self._record, total=self._plan.answers, name=order.job)

    def result(self) -> Any:
        """The frame, as far as there is one."""
        return self._plan.result(self._results)

    def counts(self) -> tuple[int, int]:
        """How many answers are finished, of how many."""
        return self._results.counts()

    def _record(self, number: int, future: Any) -> Snapshot:
        part = future.result()
        start = self._cuts[number] * self._plan.samples
        for position, params in part.structures.items():
            self._plan.structures[start + position] = params
        for position, outcome in enumerate(part.outcomes):
            self._results.record(start + position, outcome)
        last: Snapshot = part.last
        return last

    def _count(self, rows: int, folder: Path | None) -> int:
        """Partitions: as asked, as the checkpoint has them, or as there are workers."""
        if rows == 0:
            return 0
        count = self._partitions
        if count is None and folder is not None:
            count = _known_cuts(folder, rows)
        if count is None:
            count = min(EACH * max(1, len(self._client.ncores())), rows // LEAST)
        count = max(1, min(count, rows))
        if folder is not None:
            cuts = json.dumps({"rows": rows, "partitions": count})
            try:
                (folder / MANIFEST).write_text(cuts, encoding="utf-8")
            except OSError as error:
                raise _unusable(folder, error) from error
        return count


class _OfDask:
    """Its own partitions, computed and answered where they are; the frame is made of what the workers hold."""

    def __init__(self, client: Any, plan: Plan, ask: Ask, data: Any) -> None:
        self._client, self._plan, self._ask, self._data = client, plan, ask, data
        self._parts: list[Any] = []
        self._frames: dict[int, Any] = {}
        self._job: ClusterJob | None = None

    def job(self, folder: Path | None) -> ClusterJob:  # noqa: ARG002 - the partitions are the frame's own
        """What runs it."""
        from dask.delayed import delayed

        from .dask_worker import Order, run_part

        order = Order(new_name(), *self._ask, framed=True)
        self._parts = list(self._data.to_delayed())
        answered = [
            delayed(run_part, pure=False)(part, number, order, dask_key_name=f"{order.job}-{number}")
            for number, part in enumerate(self._parts)
        ]
        futures = self._client.compute(answered)
        self._job = ClusterJob(
            self._client,
            len(futures),
            futures.__getitem__,
            self._record,
            total=None,
            name=order.job,
            together=True,
        )
        return self._job

    def result(self) -> Any:
        """The frame, as far as there is one."""
        import dask.dataframe as dd
        from dask.delayed import delayed

        template, options, _ = self._ask
        plan = self._plan
        unanswered = delayed(_unanswered, pure=False)
        frames = [
            self._frames[number] if number in self._frames else unanswered(part, template, options)
            for number, part in enumerate(self._parts)
        ]
        meta = plan.form.frame(plan.rows.source, [])
        return dd.from_delayed(frames, meta=meta, divisions=self._data.divisions, verify_meta=False)

    def counts(self) -> tuple[int, int]:
        """How many answers are finished, of how many."""
        now = None if self._job is None else self._job.snapshot()
        return (0, 0) if now is None else (now.done, now.total or now.done)

    def _record(self, number: int, future: Any) -> Snapshot:
        self._frames[number] = self._client.submit(_frame_of, future, key=f"{future.key}-frame", pure=False)
        last: Snapshot = self._client.submit(_last_of, future, key=f"{future.key}-last", pure=False).result()
        return last


def _frame_of(part: Any) -> pd.DataFrame:
    frame: pd.DataFrame = part.frame
    return frame


def _last_of(part: Any) -> Snapshot:
    last: Snapshot = part.last
    return last


def _unanswered(data: Any, template: str | None, options: Mapping[str, Any]) -> Any:
    """The result of a partition that never ran."""
    plan = Plan(data, template, **options)
    return plan.result(plan.results())


def _make(folder: Path) -> None:
    if folder.is_file():
        raise CheckpointError(
            f"with a client the checkpoint is a folder, and {folder} is a file: choose another path"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"the checkpoint {folder} can't be used ({error}): choose another folder")


def _known_cuts(folder: Path, rows: int) -> int | None:
    """Into how many partitions so many rows were cut when the checkpoint was begun."""
    try:
        known = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return int(known["partitions"]) if known["rows"] == rows else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
