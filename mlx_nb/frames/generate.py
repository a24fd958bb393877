"""A prompt over a DataFrame: what the accessors, the magic and scripts all call."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import pandas as pd

from ..engine.core import EngineCore
from ..engine.interrupts import ends_the_loop, interruptible
from ..errors import RequestError
from ..sampling import SamplingParams
from ..session.media import Media, check_images
from ..session.session import default_session, prompt_for, question_for
from ..validation import choice, flag, integer
from .columns import Dtype, fields_of
from .job import Job
from .native import native_of
from .options import Column, RowParams
from .outcome import Ask
from .progress import Progress, check_progress, shown
from .results import Form, GenerationCancelled, GenerationInterrupted, Layout, Results
from .rows import Cells, Rows
from .store import Store

if TYPE_CHECKING:
    from .dask_call import ClusterCall

__all__ = ["Call", "Plan", "agenerate_frame", "call_of", "generate_frame"]


@overload
def generate_frame(
    data: pd.DataFrame | pd.Series, template: str | None = ..., **options: Any
) -> pd.DataFrame: ...
@overload
def generate_frame(data: Any, template: str | None = ..., **options: Any) -> Any: ...
def generate_frame(
    data: Any,
    template: str | None = None,
    *,
    system: str | None = None,
    messages: Hashable = None,
    images: Hashable = None,
    raw: bool = False,
    engine: str | None = None,
    model: str | None = None,
    n: int | None = None,
    shape: Literal["long", "wide"] = "long",
    into: str | None = None,
    join: bool = False,
    parsed: bool = False,
    checkpoint: str | Path | None = None,
    retry: bool = True,
    progress: Progress = True,
    client: Any = None,
    partitions: int | None = None,
    **sampling: Any,
) -> Any:
    """Answer a prompt for every row.

    Parameters
    ----------
    data : DataFrame or Series
        Of pandas; of Polars as well (``pip install 'mlx-nb[polars]'``), which comes back as Polars; or of Dask, which
        is computed where it is and comes back as Dask (``pip install 'mlx-nb[dask]'``).
    template : str
        The prompt, with columns as ``{{ name }}``, or of any name as ``{{ row["my column"] }}``; Jinja blocks
        (``{% if note %}``) work. A Series goes by its name, or as "text" if it has none; without a template its
        texts are the prompts.
    system : str, optional
        System prompt; a template as well.
    messages : column, optional
        In place of a template: its cells are conversations, lists of ``{"role": …, "content": …}``.
    images : column, optional
        Its cells are images, or lists of them: paths, URLs, bytes, arrays, figures or PIL images; a null is none.
        What can't be read fails its row.
    raw : bool
        Leave the chat template out.
    engine, model : str, optional
        The engine of this name, or one that runs this model; the current one if neither is given. With a client:
        the model that its workers run, see `start_workers`.
    n : int, optional
        Answers a row. With a seed, the later ones take the seeds after it.
    shape : {"long", "wide"}
        Of several answers: a row each, numbered in the column "sample"; or columns each, as text_0, text_1.
    into : str, optional
        Give a copy of `data` with the answers in this column and what went wrong in ``<into>_error``; with a
        schema the fields in ``<into>.<field>``.
    join : bool
        Give a copy of `data` with all columns of the result, the answers called "text", or as `into` says.
    parsed : bool
        With a schema, a column "parsed" of its values, or of instances of the Pydantic model.
    checkpoint : path, optional
        A file that keeps each answer as it is finished, by what was asked of which model. The same call then does
        only what is missing: after an interrupt, a crash, or a restart of the kernel. A truncated answer is kept as
        well; with other max_tokens it is another question. With a client it is a folder, with a file for each
        partition, on a disk that all its workers see.
    retry : bool
        Run rows again that the checkpoint has as failed; not those whose answer is there but doesn't fit the schema.
    progress : bool or {"bar", "widget"}
        Show how far the rows are: in a notebook as a widget, else as a bar. The widget's Stop ends the job as if the
        rows had run out: the frame comes back with the others "aborted".
    client : distributed.Client, optional
        Share the rows among the workers of a Dask cluster, each with an engine of its own.
    partitions : int, optional
        Parts in which the rows of a frame that isn't Dask's go to the workers; three for each of them if not given.
    **sampling
        Fields of `SamplingParams`; ``mlx_nb.col("name")`` takes one from a column. Frames decode greedily
        (``temperature=0``) unless told otherwise.

    Returns
    -------
    DataFrame
        One row for each of `data`, in order and with its index: text, the fields of a schema, state, error,
        finish_reason, prompt_tokens, completion_tokens, cached_tokens, queue_s, ttft_s, total_s (seconds).

        `state` is "done", "truncated" (by max_tokens, or before its JSON was complete), "skipped" (the template
        prints a null or an empty text), "failed", or "aborted" by an interrupt; `error` says why.

        Fields of a schema are nullable columns of their types, enums categories, nested objects columns with
        dots in their names. A field called like another column has an underscore behind its name.

    Raises
    ------
    TemplateError, RequestError, ValueError
        Before anything is generated: a column that isn't there, a parameter out of range, a name that is taken.
    EngineNotStarted
        Without an engine.
    CheckpointError
        For a checkpoint that can't be used.
    GenerationInterrupted
        On Ctrl-C or Interrupt; its `partial` holds what was finished. In a task beside a cell's it is
        GenerationCancelled, since a kernel doesn't survive the other.
    """
    return call_of(
        data,
        template,
        system=system,
        messages=messages,
        images=images,
        raw=raw,
        engine=engine,
        model=model,
        n=n,
        shape=shape,
        into=into,
        join=join,
        parsed=parsed,
        checkpoint=checkpoint,
        retry=retry,
        progress=progress,
        client=client,
        partitions=partitions,
        **sampling,
    ).run()


@overload
async def agenerate_frame(
    data: pd.DataFrame | pd.Series, template: str | None = ..., **options: Any
) -> pd.DataFrame: ...
@overload
async def agenerate_frame(data: Any, template: str | None = ..., **options: Any) -> Any: ...
async def agenerate_frame(data: Any, template: str | None = None, **options: Any) -> Any:
    """`generate_frame`, awaited, with the same options: the event loop stays free meanwhile.

    Cancelling aborts the rows in flight and raises GenerationCancelled, whose `partial` holds what was finished.
    """
    return await call_of(data, template, **options).arun()


def call_of(
    data: Any,
    template: str | None = None,
    *,
    client: Any = None,
    partitions: int | None = None,
    **options: Any,
) -> Call | ClusterCall:
    """A call on an engine of this process, or on those of a cluster; options as of `generate_frame` and `Plan`."""
    if client is None and not is_dask(data):
        if partitions is not None:
            raise RequestError(
                "partitions are for the workers of a cluster: give a client, or leave them out"
            )
        return Call(data, template, **options)
    from .dask_call import ClusterCall

    return ClusterCall(data, template, client=client, partitions=partitions, **options)


def is_dask(data: Any) -> bool:
    """Whether it is a frame or a column of Dask."""
    return type(data).__module__.partition(".")[0] == "dask" and hasattr(data, "to_delayed")


class Plan:
    """A call of `generate_frame`, checked as far as that goes without an engine.

    Parameters
    ----------
    answer, dtype
        As of `Layout`.
    also : collection of hashable
        Further columns that are needed. The other parameters are those of `generate_frame`.

    Attributes
    ----------
    data : DataFrame or Series
        In pandas.
    rows : Rows
    params : RowParams
    form : Form
        What becomes of the outcomes.
    structures : dict of int to SamplingParams
        By position, where each row has a schema of its own.
    """

    def __init__(
        self,
        data: Any,
        template: str | None = None,
        *,
        system: str | None = None,
        messages: Hashable = None,
        images: Hashable = None,
        raw: bool = False,
        n: int | None = None,
        shape: Literal["long", "wide"] = "long",
        into: str | None = None,
        join: bool = False,
        parsed: bool = False,
        checkpoint: str | Path | None = None,
        retry: bool = True,
        progress: Progress = True,
        answer: str = "text",
        dtype: Dtype = "string",
        also: Collection[Hashable] = (),
        **sampling: Any,
    ) -> None:
        self.params = RowParams(sampling)
        self.raw = raw
        self._progress = progress
        self._checkpoint, self._retry = checkpoint, retry
        self.title = _title(template)
        check_progress(progress)
        self._check_samples(n, shape)
        self._check_chat(system, messages, images)
        self._native = native_of(data)
        self.data: pd.DataFrame | pd.Series = data if self._native is None else self._native.pandas
        self.rows = Rows(
            self.data,
            template,
            system=system,
            messages=messages.name if isinstance(messages, Column) else messages,
            images=images.name if isinstance(images, Column) else images,
            also=[*also, *(column.name for column in self.params.columns.values())],
        )
        layout = self._laid_out(Layout(answer, dtype, samples=n, shape=shape), into, join, parsed)
        layout.check(self.rows.source)
        self.form: Form = layout
        if not (
            checkpoint is None or isinstance(checkpoint, Path) or (checkpoint and isinstance(checkpoint, str))
        ):
            raise RequestError(f"checkpoint is the path of a file, got {checkpoint!r}")
        if checkpoint is None and not retry:
            raise RequestError("retry is about what a checkpoint knows: give one, or leave it out")
        self.structures: dict[int, SamplingParams] = {}

    @property
    def samples(self) -> int:
        """Answers a row."""
        return self.form.samples or 1

    @property
    def answers(self) -> int:
        """Answers there will be."""
        return len(self.rows) * self.samples

    def _check_samples(self, n: int | None, shape: str) -> None:
        choice("shape", shape, ("long", "wide"))
        if n is None:
            if shape != "long":
                raise RequestError("shape is for several answers a row: give n as well")
            return
        if (
            integer("n", n, low=1) > 1
            and self.params.base.greedy
            and "temperature" not in self.params.columns
        ):
            raise RequestError(
                "with temperature 0 all answers of a row are the same: give a temperature, or leave n out"
            )

    def _check_chat(self, system: str | None, messages: Hashable, images: Hashable) -> None:
        flag("raw", self.raw)
        thinking = self.params.base.thinking is not None or "thinking" in self.params.columns
        if self.raw and (system is not None or thinking):
            raise RequestError("system and thinking act through the chat template: leave them out, or raw")
        if self.raw and messages is not None:
            raise RequestError("messages need the chat template: leave raw out")
        if self.raw and images is not None:
            raise RequestError("images need the chat template: leave raw out")

    def _laid_out(self, layout: Layout, into: str | None, join: bool, parsed: bool) -> Layout:
        flag("join", join)
        flag("parsed", parsed)
        flag("retry", self._retry)
        if into is not None and not (isinstance(into, str) and into):
            raise RequestError(f"into is the name of a column, got {into!r}")
        if join and into is not None:
            layout, into = replace(layout, answer=into), None
        schema = self.params.base.json_schema
        of_rows = "schema" in self.params.columns
        if parsed and schema is None and not of_rows:
            raise RequestError("parsed is of a schema: give one, or leave it out")
        fields = () if schema is None else fields_of(schema)
        return replace(layout, fields=fields, parsed=parsed or of_rows, into=into, join=join)

    def results(self) -> Results:
        """What takes the outcomes."""
        return Results(
            self.rows.source, self.form, lambda position: self.structures.get(position, self.params.base)
        )

    def result(self, results: Results) -> pd.DataFrame:
        """The frame; where `data` isn't pandas, in its own kind."""
        frame = results.frame()
        if self._native is not None:
            frame = self._native.result(frame, self.form)
        return frame

    def _samples(self) -> Iterator[tuple[int, int, Cells]]:
        """Position, number of the sample, and cells of all that is asked."""
        position = 0
        for cells in self.rows:
            for sample in range(self.samples):
                yield position, sample, cells
                position += 1


class Call(Plan):
    """A call of `generate_frame` on one engine; runs once.

    Parameters
    ----------
    engine : str or EngineCore, optional
        Its name, or the engine itself. The other parameters are those of `Plan`.

    Attributes
    ----------
    core : EngineCore
    """

    def __init__(
        self,
        data: Any,
        template: str | None = None,
        *,
        engine: str | EngineCore | None = None,
        model: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(data, template, **options)
        if engine is not None and model is not None:
            raise RequestError("engine and model both choose who answers: give one")
        self._engine: str | None = None
        if isinstance(engine, EngineCore):
            self.core: EngineCore = engine
            return
        session = default_session()
        named = session.get(engine) if model is None else session.running(model)
        self.core = named.core
        self._engine = None if named is session.current else named.name

    def run(self) -> pd.DataFrame:
        """The result, blocking."""
        with interruptible():
            self.core.wait_ready()
        self.check()
        with self.store() as store:
            results, job = self.job(store)
            try:
                with self._shown(job):
                    job.run()
            except KeyboardInterrupt:
                kind = GenerationCancelled if ends_the_loop() else GenerationInterrupted
                raise kind(self.result(results), *results.counts()) from None
        return self.result(results)

    async def arun(self) -> pd.DataFrame:
        """The result, awaited."""
        await self.core.ready()
        self.check()
        with self.store() as store:
            results, job = self.job(store)
            try:
                with self._shown(job):
                    await job.arun()
            except asyncio.CancelledError:
                raise GenerationCancelled(self.result(results), *results.counts()) from None
        return self.result(results)

    def check(self) -> None:
        """Refuse what the model can do for no row. It must be there."""
        self.core.check(self.params.base)
        if self.rows.has_images:
            check_images(self.core)

    def ask(self, cells: Cells, sample: int = 0) -> Ask:
        """What a row asks. Raises what is wrong with the row."""
        prompt, system = self.rows.prompt(cells), self.rows.system(cells)
        params = self.params.of(cells, sample)
        asked, media = question_for(
            self.core, prompt, Media.of(self.rows.images(cells) or None), system=system, raw=self.raw
        )
        tokens = prompt_for(self.core, asked, system=system, raw=self.raw, thinking=params.thinking)
        text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
        return Ask(tokens, text, params, media.pictures or None)

    def store(self) -> AbstractContextManager[Store | None]:
        """The checkpoint, while it is open."""
        return nullcontext() if self._checkpoint is None else Store.open(self._checkpoint)

    def job(self, store: Store | None) -> tuple[Results, Job[tuple[int, int, Cells]]]:
        """What runs the rows, and what takes their outcomes."""
        labels, samples = self.rows.source.index, self.samples
        results = self.results()
        job = Job(
            self.core,
            self._samples(),
            self._ask_at,
            results.record,
            recall=results.outcome,
            store=store,
            retry_failed=self._retry,
            share=not self.rows.has_images,
            total=self.answers,
            label=lambda position: str(labels[position // samples]),
        )
        return results, job

    def _shown(self, job: Job[Any]) -> AbstractContextManager[None]:
        return shown(job, self._progress, core=self.core, title=self.title, engine=self._engine)

    def _ask_at(self, row: tuple[int, int, Cells]) -> Ask:
        position, sample, cells = row
        ask = self.ask(cells, sample)
        if self.params.differs_in_structure:
            self.structures[position] = ask.params
        return ask


def _title(template: str | None) -> str:
    """The first words of what is asked."""
    words = " ".join(str(template or "").split()) or "A prompt for every row"
    return words if len(words) <= 60 else f"{words[:59]}…"
