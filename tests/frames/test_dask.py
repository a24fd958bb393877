"""Rows on the workers of a Dask cluster: two processes on this machine, an engine in each."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from models import tiny_folder

import mlx_nb
from mlx_nb import CheckpointError, GenerationCancelled, ModelLoadError, RequestError
from mlx_nb.frames.accessor import register_dask

dask_frames = pytest.importorskip("dask.dataframe")
distributed = pytest.importorskip("distributed")
register_dask()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Dask's, as its processes end
]

MEASURED = ["cached_tokens", "queue_s", "ttft_s", "total_s"]
LONG = {"max_tokens": 400, "ignore_eos": True, "progress": False}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Return the client of two workers that run a tiny model."""
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):
        mlx_nb.start_workers(client, tiny_folder(), gpu_memory_utilization=0.8)
        yield client


@pytest.fixture
def local() -> Iterator[None]:
    """Run the same model in this process."""
    mlx_nb.start(tiny_folder(), name="local")
    yield
    mlx_nb.stop("local")


@pytest.fixture
def frame() -> pd.DataFrame:
    """Return rows with repetitions, nulls, and an index that has duplicates."""
    words = [f"word {i % 70}" for i in range(120)] + [None, "", "last"]
    return pd.DataFrame({"word": words, "n": range(123)}, index=[i // 2 for i in range(123)])


def compare(far: pd.DataFrame, near: pd.DataFrame) -> None:
    measured = [name for name in near if str(name).rpartition("_")[0] in MEASURED or name in MEASURED]
    pd.testing.assert_frame_equal(far.drop(columns=measured), near.drop(columns=measured))
    assert list(far.columns) == list(near.columns)
    assert far.dtypes.equals(near.dtypes)


def handled(client: Any) -> int:
    """Return how many requests all engines have handled."""
    return sum(stats["num_requests_processed"] for stats in mlx_nb.start_workers(client).stats().values())


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not come about in time")


SCHEMA = {
    "type": "object",
    "properties": {"known": {"type": "boolean"}},
    "required": ["known"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_tokens": 12}, id="plain"),
        pytest.param({"max_tokens": 8, "temperature": 0.8, "seed": 5, "n": 2}, id="samples"),
        pytest.param({"max_tokens": 8, "into": "answer"}, id="into"),
        pytest.param({"max_tokens": 12, "schema": SCHEMA, "join": True, "parsed": True}, id="schema"),
        pytest.param({"max_tokens": mlx_nb.col("n"), "partitions": 7}, id="by column"),
    ],
)
def test_the_result_is_that_of_one_engine(
    client: Any, local: None, frame: pd.DataFrame, options: dict[str, Any]
) -> None:
    far = frame.mlx.generate("Say {{ word }}", client=client, progress=False, **options)
    options.pop("partitions", None)
    near = frame.mlx.generate("Say {{ word }}", progress=False, **options)

    compare(far, near)


def test_a_series_is_classified(client: Any, local: None, frame: pd.DataFrame) -> None:
    far = frame["word"].mlx.classify(["poet", "engine"], client=client, progress=False)
    near = frame["word"].mlx.classify(["poet", "engine"], progress=False)

    compare(far, near)


def test_a_dask_frame_stays_with_the_workers(client: Any, local: None, frame: pd.DataFrame) -> None:
    near = frame.mlx.generate("Say {{ word }}", max_tokens=12, join=True, progress=False)
    lazy = dask_frames.from_pandas(frame, npartitions=4)

    far = lazy.mlx.generate("Say {{ word }}", max_tokens=12, join=True, progress=False)

    assert far.divisions == lazy.divisions
    assert list(far.columns) == list(near.columns)
    asked = handled(client)
    compare(far.compute().astype({"word": near["word"].dtype}), near)
    assert handled(client) == asked
    assert far["state"].value_counts().compute().to_dict() == near["state"].value_counts().to_dict()


def test_a_dask_column_is_classified(client: Any, local: None, frame: pd.DataFrame) -> None:
    near = frame["word"].mlx.classify(["poet", "engine"], progress=False)
    lazy = dask_frames.from_pandas(frame, npartitions=2)["word"]

    far = lazy.mlx.classify(["poet", "engine"], client=client, progress=False)

    compare(far.compute(), near)


def test_equal_prompts_of_a_partition_run_once(client: Any) -> None:
    frame = pd.DataFrame({"word": ["the very same"] * 60})
    before = handled(client)

    frame.mlx.generate("{{ word }}", max_tokens=4, client=client, partitions=2, progress=False)

    assert handled(client) - before == 2


def test_a_polars_frame_comes_back_as_one(client: Any, local: None, frame: pd.DataFrame) -> None:
    polars = pytest.importorskip("polars")
    words = polars.DataFrame({"word": [None if pd.isna(word) else word for word in frame["word"]]})

    far = mlx_nb.generate_frame(
        words, "Say {{ word }}", client=client, max_tokens=4, join=True, progress=False
    )
    near = mlx_nb.generate_frame(words, "Say {{ word }}", max_tokens=4, join=True, progress=False)

    assert far.drop(MEASURED).equals(near.drop(MEASURED))


def test_an_empty_frame_has_its_columns(client: Any, local: None, frame: pd.DataFrame) -> None:
    far = frame.head(0).mlx.generate("{{ word }}", client=client, progress=False)

    compare(far, frame.head(0).mlx.generate("{{ word }}", progress=False))


def test_a_worker_killed_on_the_way_costs_nothing(
    client: Any, local: None, frame: pd.DataFrame, tmp_path: Path
) -> None:
    near = frame.mlx.generate("Say {{ word }}", **LONG)
    before = handled(client)
    pids = client.run(os.getpid)
    killed = []

    def kill() -> None:
        wait_for(lambda: handled(client) > before + 10)
        killed.append(pids.popitem()[1])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    far = frame.mlx.generate(
        "Say {{ word }}", client=client, checkpoint=tmp_path / "job", partitions=6, **LONG
    )
    killer.join()

    assert killed
    compare(far, near)
    wait_for(lambda: len(client.ncores()) == 2)
    mlx_nb.start_workers(client)  # the new one has the engine as well
    assert killed[0] not in client.run(os.getpid).values()


SCRIPT = """
import sys
import pandas as pd

def main():
    import distributed
    import mlx_nb, mlx_nb.frames.accessor
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    client = distributed.Client(cluster)
    frame = pd.read_json(sys.argv[1], orient="split")
    mlx_nb.start_workers(client, sys.argv[2])
    print("RUNNING", flush=True)
    frame.mlx.generate(
        "Say {{ word }}", client=client, checkpoint=sys.argv[3], max_tokens=400, ignore_eos=True, progress=False,
        partitions=5,
    )
    print("DONE", flush=True)

if __name__ == "__main__":
    main()
"""


def test_after_the_scheduler_was_killed_only_the_rest_runs(
    client: Any, local: None, frame: pd.DataFrame, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    frame.to_json(tmp_path / "frame.json", orient="split")
    job = tmp_path / "job"
    process = subprocess.Popen(
        [sys.executable, "script.py", "frame.json", str(tiny_folder()), str(job)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"RUNNING\n"
        wait_for(lambda: finished(job) >= 10)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    time.sleep(1)
    kept, before = finished(job), handled(client)

    far = frame.mlx.generate("Say {{ word }}", client=client, checkpoint=job, **LONG)

    distinct = sum(part["word"].replace("", None).nunique() for part in cut(frame, 5))
    assert 10 <= kept < distinct
    assert handled(client) - before == distinct - kept
    compare(far, frame.mlx.generate("Say {{ word }}", **LONG))


def cut(frame: pd.DataFrame, count: int) -> list[pd.DataFrame]:
    places = [len(frame) * number // count for number in range(count + 1)]
    return [frame.iloc[a:b] for a, b in itertools.pairwise(places)]


def finished(folder: Path) -> int:
    """Return how many answers a checkpoint has."""
    import sqlite3

    count = 0
    for file in folder.glob("*.sqlite"):
        connection = sqlite3.connect(file)
        try:
            count += connection.execute("SELECT COUNT(*) FROM outcomes").fetchone()[0]
        except sqlite3.OperationalError:  # just being made
            pass
        finally:
            connection.close()
    return count


async def test_cancelling_keeps_what_is_finished(client: Any, frame: pd.DataFrame) -> None:
    before = handled(client)
    job = asyncio.create_task(
        mlx_nb.agenerate_frame(frame, "Say {{ word }}", client=client, partitions=6, **LONG)
    )
    await asyncio.to_thread(wait_for, lambda: handled(client) > before + 10)
    job.cancel()
    with pytest.raises(GenerationCancelled) as caught:
        await job

    partial = caught.value.partial
    assert partial.index.equals(frame.index)
    assert 0 < caught.value.done < len(frame)
    assert set(partial["state"].dropna()) <= {"done", "truncated", "skipped", "aborted"}
    assert (partial["state"] == "aborted").sum() == len(frame) - caught.value.done
    wait_for(lambda: busy(client) == 0)


async def test_cancelling_a_job_on_a_dask_frame_ends_all_its_partitions(
    client: Any, frame: pd.DataFrame
) -> None:
    lazy = dask_frames.from_pandas(frame, npartitions=12)
    before = handled(client)
    job = asyncio.create_task(mlx_nb.agenerate_frame(lazy, "Say {{ word }}", client=client, **LONG))
    await asyncio.to_thread(wait_for, lambda: handled(client) > before + 10)
    job.cancel()
    with pytest.raises(GenerationCancelled) as caught:
        await job

    partial = (await asyncio.to_thread(caught.value.partial.compute)).sort_index()
    assert partial.index.equals(frame.index)
    assert (partial["state"] == "aborted").any()
    wait_for(lambda: busy(client) == 0)
    asked = handled(client)
    await asyncio.sleep(1)
    assert (busy(client), handled(client)) == (0, asked)


def busy(client: Any) -> int:
    return sum(stats["active_requests"] for stats in mlx_nb.start_workers(client).stats().values())


def test_a_client_that_leaves_frees_the_engines(client: Any, frame: pd.DataFrame, tmp_path: Path) -> None:
    script = SCRIPT.replace(
        'cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")',
        f"cluster = {client.scheduler.address!r}",
    )
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    frame.to_json(tmp_path / "frame.json", orient="split")
    process = subprocess.Popen(
        [sys.executable, "script.py", "frame.json", str(tiny_folder()), str(tmp_path / "job")],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: busy(client) > 0)
    finally:
        process.kill()
        process.wait()

    wait_for(lambda: busy(client) == 0, 20)
    assert finished(tmp_path / "job") < len(frame)


def test_a_worker_without_the_model_is_one_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "tiny").symlink_to(tiny_folder())
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        lucky, unlucky = client.run(os.getpid)
        client.run(os.chdir, str(tmp_path / "there"), workers=[lucky])
        capfd.readouterr()
        with pytest.raises(ModelLoadError) as caught:
            mlx_nb.generate_frame(
                pd.DataFrame({"word": ["a"] * 40}),
                "{{ word }}",
                client=client,
                model="./tiny",
                progress=False,
            )
        assert mlx_nb.Workers(client, "./tiny").stats() == {}
        printed = "".join(capfd.readouterr())

    assert str(caught.value).startswith(f"worker {unlucky} can't run ./tiny: ")
    assert "\n" not in str(caught.value)
    assert "Traceback" not in printed


def test_what_is_wrong_is_said_before_anything_runs(client: Any, frame: pd.DataFrame, tmp_path: Path) -> None:
    lazy = dask_frames.from_pandas(frame, npartitions=2)
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="there is no column"):
        lazy.mlx.generate("{{ wrd }}", client=client)
    with pytest.raises(RequestError, match="repartition"):
        lazy.mlx.generate("{{ word }}", client=client, partitions=3)
    with pytest.raises(RequestError, match="engine names one of this process"):
        frame.mlx.generate("{{ word }}", client=client, engine="local")
    with pytest.raises(RequestError, match=r"client is a distributed\.Client"):
        frame.mlx.generate("{{ word }}", client="tcp://127.0.0.1:8786")
    with pytest.raises(RequestError, match="give a client"):
        frame.mlx.generate("{{ word }}", partitions=3)
    with pytest.raises(RequestError, match="stop them first"):
        frame.mlx.generate("{{ word }}", client=client, model="demo")
    with pytest.raises(CheckpointError, match="a folder"):
        frame.mlx.generate("{{ word }}", client=client, checkpoint=tmp_path / "file")
    (tmp_path / "folder" / "partitions.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="can't be used"):
        frame.mlx.generate("{{ word }}", client=client, checkpoint=tmp_path / "folder")


def test_workers_that_run_are_asked_for_nothing_else(client: Any) -> None:
    mlx_nb.start_workers(client, tiny_folder(), gpu_memory_utilization=0.8)  # the same again
    with pytest.raises(RequestError, match="with other options: stop them first"):
        mlx_nb.start_workers(client, tiny_folder(), max_num_seqs=3)


def test_a_monitor_has_a_row_for_each_worker(client: Any, frame: pd.DataFrame) -> None:
    workers = mlx_nb.start_workers(client)
    job = threading.Thread(
        target=frame.mlx.generate,
        args=("Say {{ word }}",),
        kwargs={"client": client, "partitions": 4, **LONG},
    )
    job.start()
    wait_for(lambda: all(len(stats["partitions"]) for stats in workers.stats().values()))
    monitor = workers.monitor()
    time.sleep(1)
    job.join()

    addresses = sorted(address.rpartition("/")[2] for address in client.ncores())
    assert monitor.engine["workers"]
    assert monitor.engine["model"] == str(tiny_folder())
    assert monitor.engine["backend"].endswith("2 workers")
    assert [row["id"] for row in monitor.rows] == addresses
    assert {moving["phase"] for moving in monitor.progress} == {"decode"}
    assert sum(moving["total"] for moving in monitor.progress) > 0
    assert monitor.load["running"] > 0
    assert monitor.memory["weights"] > 0
    html = monitor._repr_mimebundle_()[0]["text/html"]
    assert all(address in html for address in addresses)
    monitor.close()


def test_the_engines_of_a_machine_share_its_memory(client: Any) -> None:
    memory = [stats["memory"]["limit"] for stats in mlx_nb.start_workers(client).stats().values()]

    from mlx_nb.backends.fit import device_memory

    assert memory == [pytest.approx(0.4 * device_memory(), rel=0.01)] * 2
