"""One model over two processes that mlx's launcher starts on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from models import tiny_folder

import mlx_nb
from mlx_nb import EngineCore, RequestError, SamplingParams
from mlx_nb.backends.pretrained import Pretrained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STARTED_S = 120

PROMPTS = ["The engine of words", "Sphinx of black quartz", "A tiny tokenizer " * 40, "2 + 2", "x" * 300]
GREEDY = {"temperature": 0, "max_tokens": 24}
SEEDED = {"temperature": 0.9, "top_p": 0.8, "seed": 7, "repetition_penalty": 1.2, "max_tokens": 24}
CHOICE = {"temperature": 0, "choices": ["poet", "engine"]}

BEGIN = f"""
import json, os, sys, time
import mlx_nb
from mlx_nb import SamplingParams

folder, out = sys.argv[1:]
mlx_nb.follow()
core = mlx_nb.start(folder, distributed=True).engine
PROMPTS, GREEDY, SEEDED, CHOICE = {PROMPTS!r}, {GREEDY!r}, {SEEDED!r}, {CHOICE!r}
said = {{}}

def leave():
    with open(out, "w") as file:
        json.dump(said, file)
    mlx_nb.stop()
"""

ANSWERS = (
    BEGIN
    + """
def ids(params, prompts=PROMPTS):
    return [o.output_token_ids for o in core.generate_batch_sync(prompts, SamplingParams(**params))]

said["greedy"] = ids(GREEDY)
said["again"] = ids(GREEDY)
said["seeded"] = ids(SEEDED)
said["choice"] = ids(CHOICE, PROMPTS[:2])
said["hits"] = core.get_cache_stats()["hits"]
whole = core.generate_sync(PROMPTS[0], SamplingParams(**GREEDY)).output_text
said["whole"], said["word"] = whole, whole[8:11]
said["stopped"] = core.generate_sync(PROMPTS[0], SamplingParams(**GREEDY, stop=whole[8:11])).output_text
request = core.submit(PROMPTS[1], SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
stream = core.stream_sync(request)
next(stream)
core.abort(request)
said["aborted"] = [output.finish_reason for output in stream][-1]
said["after"] = ids(GREEDY)
try:
    core.submit("hello", SamplingParams(logits_processors=[lambda tokens, logits: logits]))
except mlx_nb.RequestError as error:
    said["processors"] = str(error)
core.clear_prefix_cache()
core.warm_up_now()
said["stats"] = core.get_stats()["distributed"]
mlx_nb.stop()
core = mlx_nb.start(folder, distributed=True).engine
said["restarted"] = ids(GREEDY)
leave()
"""
)

LOSS = (
    BEGIN
    + """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others of a process that died
request = core.submit(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
stream = core.stream_sync(request)
next(stream)
print("RUNNING", flush=True)
try:
    for _ in stream:
        pass
    said["error"] = None
except Exception as error:
    said["error"] = f"{type(error).__name__}: {error}"
try:
    core.generate_sync("once more")
except Exception as error:
    said["next"] = type(error).__name__
leave()
"""
)


def launch(script: str, folder: Path) -> subprocess.Popen[str]:
    """Start two processes of a script on the ring."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "script.py").write_text(script, encoding="utf-8")
    command = [sys.executable, str(folder / "script.py"), str(tiny_folder()), str(folder / "said.json")]
    launcher = Path(sys.executable).with_name("mlx.launch")
    return subprocess.Popen(
        [str(launcher), "-n", "2", "--backend", "ring", "--starting-port", str(port), "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> str:
    """Wait for the end; what was printed. Leaves nothing running."""
    try:
        return process.communicate(timeout=STARTED_S)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what two processes made of one model."""
    folder = tmp_path_factory.mktemp("answers")
    process = launch(ANSWERS, folder)
    printed = end(process)
    assert (folder / "said.json").exists(), printed
    assert process.returncode == 0, printed
    return json.loads((folder / "said.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def alone() -> EngineCore:
    """Return an engine that has the model to itself."""
    core = EngineCore(None, None, backend=Pretrained(str(tiny_folder())))
    core.launch()
    core.wait_ready()
    yield core
    core.close()


def ids(core: EngineCore, params: dict[str, Any], prompts: list[str] = PROMPTS) -> list[list[int]]:
    return [output.output_token_ids for output in core.generate_batch_sync(prompts, SamplingParams(**params))]


def test_two_processes_answer_as_one(said: dict[str, Any], alone: EngineCore) -> None:
    assert said["greedy"] == ids(alone, GREEDY)
    assert said["seeded"] == ids(alone, SEEDED)
    assert said["choice"] == ids(alone, CHOICE, PROMPTS[:2])


def test_cache_hits_aborts_and_restarts_change_nothing(said: dict[str, Any]) -> None:
    assert said["hits"] > 0
    assert said["again"] == said["after"] == said["restarted"] == said["greedy"]
    assert said["aborted"] == "abort"


def test_a_stop_string_ends_the_answer(said: dict[str, Any]) -> None:
    assert said["stopped"] == said["whole"].partition(said["word"])[0]


def test_what_runs_in_one_process_only_is_refused(said: dict[str, Any]) -> None:
    assert said["processors"].startswith("logits processors run in one process only")
    assert said["stats"] == {"rank": 0, "processes": 2}


def test_the_death_of_a_process_is_one_clear_error(tmp_path: Path) -> None:
    with launch(LOSS, tmp_path) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            assert any("RUNNING" in line for line in lines)
            (victim,) = followers(process)
            os.kill(victim, signal.SIGKILL)
            printed = "".join(lines)
            process.wait(STARTED_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    said = json.loads((tmp_path / "said.json").read_text(encoding="utf-8"))

    assert said["error"].startswith("EngineStopped: a process of the model has ended")
    assert said["next"] == "EngineStopped"
    assert "Traceback" not in printed


def followers(launcher: subprocess.Popen[str]) -> list[int]:
    """Return the ids of the processes that are not the first."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                group = os.getpgid(int(folder.name))
            except OSError:
                continue
            if group == launcher.pid and b"MLX_RANK=1" in environment:
                found.append(int(folder.name))
        if found:
            return found
        time.sleep(0.1)
    return []


def test_without_the_launcher_it_says_how_to_start() -> None:
    with pytest.raises(RequestError, match=r"mlx\.launch -n 2"):
        mlx_nb.start(tiny_folder(), name="parts", distributed=True)


def test_a_process_alone_has_nobody_to_follow() -> None:
    mlx_nb.follow()
