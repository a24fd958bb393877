"""``%mlx_engine`` in a shell without a kernel."""

import ctypes
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import platformdirs
import pytest
from models import make_folder
from scripts import wait_until

from mlx_nb import AsyncEngineCore, EngineConfig, EngineCore, ModelLoadError, SamplingParams, SchedulerConfig
from mlx_nb.backends import cpu_blas
from mlx_nb.backends.fake import fake_backend
from mlx_nb.notebook.engine_options import COMMANDS
from mlx_nb.session.session import default_session

Run = Callable[[str], Any]
Adopt = Callable[..., EngineCore]


def test_an_engine_is_started_described_and_stopped(run: Run, models: dict[str, Any]) -> None:
    started = run("%mlx_engine start demo")
    assert started.error is None
    assert started.out.splitlines()[0].startswith("Loading demo")
    assert "fake is ready: bytes, no device, 4,096 tokens of context, loaded in 0." in started.out

    assert run("%mlx_engine status").out.startswith("default · fake · running · 0 running, 0 waiting · ")
    assert run("%mlx_generate -n 3 --raw abc").value == "abc"

    assert run("%mlx_engine stop").out == "'default' (demo) is stopped\n"
    assert default_session().engines == {}
    assert run("%mlx_engine").out.startswith("no engine is running: start one with %mlx_engine start demo")
    assert run("%mlx_engine stop").err.startswith("UsageError: no engine is running")


def test_admission_is_paused_and_resumed(run: Run, adopt: Adopt) -> None:
    core = adopt()
    adopt("other")
    assert run("%mlx_engine pause default").out == (
        "'default' starts no more requests: %mlx_engine resume default undoes it\n"
    )
    assert core.paused
    assert " · paused · 0 running, 0 waiting" in run("%mlx_engine status default").out
    core.submit("abc", request_id="r1")
    assert " · paused · 0 running, 1 waiting" in run("%mlx_engine status default").out
    assert run("%mlx_engine resume default").out == "'default' takes requests\n"
    assert " · running · " in run("%mlx_engine status default").out
    assert run("%mlx_engine pause nowhere").err.startswith("UsageError: there is no engine 'nowhere'")


OPTIONS_OF_START = {
    "--max-num-seqs 3": {"max_num_seqs": 3},
    "--max-num-batched-tokens 99": {"max_num_batched_tokens": 99},
    "--prefill-batch-size 2": {"prefill_batch_size": 2},
    "--completion-batch-size 4": {"completion_batch_size": 4},
    "--prefill-step-size 64": {"prefill_step_size": 64},
    "--policy priority": {"policy": "priority"},
    "--no-prefix-cache": {"enable_prefix_cache": False},
    "--cache-memory-mb 50": {"cache_memory_mb": 50.0},
    "--cache-memory-percent 0.1": {"cache_memory_percent": 0.1},
    "--kv-bits 4 --kv-group-size 32": {
        "kv_cache_quantization": True,
        "kv_cache_quantization_bits": 4,
        "kv_cache_quantization_group_size": 32,
    },
    "--stream-interval 5": {"stream_interval": 5},
    "--step-interval 0.01": {"step_interval": 0.01},
    "--gpu-memory-utilization 0.5": {"gpu_memory_utilization": 0.5},
    "--idle-unload 60": {"idle_unload_s": 60.0},
}


@pytest.mark.parametrize(("options", "fields"), OPTIONS_OF_START.items(), ids=OPTIONS_OF_START)
def test_options_reach_the_engine(
    run: Run, models: dict[str, Any], options: str, fields: dict[str, Any]
) -> None:
    assert run(f"%mlx_engine start demo {options}").error is None

    config, _ = models["demo"]
    for part in (config, config.scheduler_config):
        for field in dataclasses.fields(part):
            if field.name != "scheduler_config":
                expected = fields.get(field.name, getattr(type(part)(), field.name))
                assert getattr(part, field.name) == expected, field.name


def test_every_setting_of_an_engine_is_an_option() -> None:
    settable = {field for fields in OPTIONS_OF_START.values() for field in fields}
    # The name is the model's own; a bounded cache is refused by every engine; the other holds the rest.
    without = {"model_name", "max_kv_size", "scheduler_config"}

    everything = {
        field.name for kind in (EngineConfig, SchedulerConfig) for field in dataclasses.fields(kind)
    }
    assert settable == everything - without


def test_an_adapter_and_code_of_the_model_reach_the_loader(run: Run, models: dict[str, Any]) -> None:
    run("%mlx_engine start plain")
    run("%mlx_engine start demo --name other --adapter 'my adapter' --trust-remote-code")

    assert [models[model][1]["trust_remote_code"] for model in ("plain", "demo")] == [False, True]
    assert [models[model][1]["adapter_path"] for model in ("plain", "demo")] == [None, "my adapter"]


def test_blas_threads_are_set_for_the_process(
    run: Run, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cpu_blas, "set_threads", asked.append)

    run("%mlx_engine start demo --blas-threads 2")

    assert asked == [2]


def test_the_threads_of_openblas_can_be_counted_and_set() -> None:
    before = cpu_blas.threads()
    if before is None:
        with pytest.raises(ValueError, match="blas_threads is for OpenBLAS, which isn't in use here"):
            cpu_blas.set_threads(1)
        return
    try:
        cpu_blas.set_threads(1)
        assert cpu_blas.threads() == ctypes.CDLL(None).openblas_get_num_threads() == 1
        with pytest.raises(ValueError, match="blas_threads must be at least 1, got 0"):
            cpu_blas.set_threads(0)
    finally:
        cpu_blas.set_threads(before)


def test_starting_what_runs_is_a_note_and_another_model_needs_a_name(
    run: Run, models: dict[str, Any]
) -> None:
    run("%mlx_engine start one")

    assert run("%mlx_engine start one").out.startswith("one runs already, as 'default'")
    assert run("%mlx_engine start two").err == (
        "UsageError: engine 'default' runs one: stop it first (%mlx_engine stop), or choose another --name\n"
    )
    assert run("%mlx_engine start two --name second").error is None
    listed = run("%mlx_engine list").out.splitlines()
    assert [line[:9] for line in listed] == ["  default", "* second "]
    assert run("%mlx_generate -e default -n 2 --raw abc").value == "ab"


def test_a_model_is_the_same_under_its_alias(run: Run, models: dict[str, Any]) -> None:
    run("%mlx_engine start qwen3-0.6b")

    again = run("%mlx_engine start mlx-community/Qwen3-0.6B-4bit")

    assert (again.error, list(models)) == (None, ["qwen3-0.6b"])
    assert again.out.startswith("qwen3-0.6b runs already, as 'default'")


def test_a_failed_start_is_one_line_and_leaves_nothing(run: Run, models: dict[str, Any]) -> None:
    run("%mlx_engine start one")

    failed = run("%mlx_engine start broken --name second")

    assert failed.err == "UsageError: broken has no weights: download it again\n"
    assert list(default_session().engines) == ["default"]
    assert default_session().current is default_session().engines["default"]
    assert run("%mlx_generate -n 2 --raw abc").value == "ab"


def test_a_restart_has_the_same_options_and_serves_again(run: Run, models: dict[str, Any]) -> None:
    run("%mlx_engine start one --max-num-seqs 3")
    run("%mlx_engine start two --name second")
    core = default_session().get("default").core

    restarted = run("%mlx_engine restart default")

    assert restarted.error is None
    assert "fake is ready" in restarted.out
    assert default_session().current is default_session().engines["default"]
    assert default_session().current.core is core
    assert core.config.scheduler_config.max_num_seqs == 3
    assert run("%mlx_generate -n 2 --raw abc").value == "ab"


def test_a_restart_ends_what_still_runs(run: Run, adopt: Adopt) -> None:
    core = adopt(step_s=0.01)
    request = core.submit("abc", SamplingParams(max_tokens=1000))

    run("%mlx_engine restart")

    with pytest.raises(Exception, match="stopped before this request was finished"):
        list(core.stream_sync(request))
    assert run("%mlx_generate -n 2 --raw abc").value == "ab"


def test_a_stopped_engine_says_how_to_have_it_back(run: Run, adopt: Adopt) -> None:
    adopt().stop_now()

    assert run("%mlx_generate hi").err == (
        "UsageError: engine 'default' is stopped: start it again with %mlx_engine restart default\n"
    )
    assert run("%mlx_engine list").out == "* default · fake · stopped · %mlx_engine restart default\n"
    run("%mlx_engine restart")
    assert run("%mlx_generate -n 2 --raw abc").value == "ab"


def test_a_failed_engine_says_why_and_how_to_have_it_back(run: Run) -> None:
    mended: list[bool] = []

    def flaky(config: EngineConfig, on_progress: Any) -> Any:
        if not mended:
            raise ModelLoadError("the disk is gone")
        return fake_backend()(config, on_progress)

    core = EngineCore(None, None, backend=flaky)
    default_session().adopt("default", "flaky", AsyncEngineCore.over(core))
    wait_until(lambda: core.state == "failed")

    why = "engine 'default' failed (the disk is gone): start it again with %mlx_engine restart default"
    assert run("%mlx_generate hi").err == f"UsageError: {why}\n"
    assert "the disk is gone · %mlx_engine restart default" in run("%mlx_engine status").out
    assert f"✗ {why}" in run("%mlx_engine doctor").out
    assert run("%mlx_engine restart").err == "UsageError: the disk is gone\n"
    mended.append(True)
    assert run("%mlx_engine restart").error is None
    assert run("%mlx_generate -n 2 --raw abc").value == "ab"


def test_a_closed_engine_says_what_to_do(run: Run, adopt: Adopt) -> None:
    adopt().close()

    closed = "UsageError: engine 'default' is closed: start another with %mlx_engine start fake\n"
    assert run("%mlx_generate hi").err == closed
    assert run("%mlx_engine restart").err == closed


def test_the_current_engine_is_chosen_by_use(run: Run, adopt: Adopt) -> None:
    adopt("one")
    adopt("two")

    assert run("%mlx_engine use one").out.startswith("one · fake · running")
    assert default_session().current is default_session().engines["one"]
    assert run("%mlx_engine use").err == "UsageError: which engine? there is 'one', 'two'\n"
    assert run("%mlx_engine use three").err == (
        "UsageError: there is no engine 'three' (running: one, two)\n"
    )


def test_live_requests_are_a_frame(run: Run, adopt: Adopt) -> None:
    core = adopt(step_s=0.01)
    nothing = run("%mlx_engine requests").value
    core.submit("abc", SamplingParams(max_tokens=1000), "mine", preview="a question")
    wait_until(lambda: core.get_stats()["requests"][0]["completion_tokens"] > 2)

    run("%mlx_engine requests -o live")
    frame = run("live").value

    assert list(frame.index) == ["mine"]
    assert frame.index.name == nothing.index.name == "request_id"
    assert frame.loc["mine", "phase"] == "decode"
    assert (frame.loc["mine", "prompt_tokens"], frame.loc["mine", "max_tokens"]) == (3, 1000)
    assert 0 < frame.loc["mine", "progress"] < 1
    assert len(nothing) == 0
    assert list(nothing.columns) == list(frame.columns[: len(nothing.columns)])
    assert list(nothing.dtypes) == list(frame.dtypes[: len(nothing.columns)])


def test_requests_are_aborted_by_id_or_all_at_once(run: Run, adopt: Adopt) -> None:
    core = adopt(step_s=0.01)
    other = adopt("other", step_s=0.01)
    for name in ("a", "b", "c"):
        core.submit("abc", SamplingParams(max_tokens=10_000), name)
    other.submit("abc", SamplingParams(max_tokens=10_000), "d")

    assert run("%mlx_engine abort a d").out == "'a', 'd' are aborted\n"
    assert run("%mlx_engine abort a").err == (
        "UsageError: no live request 'a': %mlx_engine requests shows them\n"
    )
    assert run("%mlx_engine abort --all -e default").out == "2 requests are aborted\n"
    assert core.get_stats()["active_requests"] == other.get_stats()["active_requests"] == 0
    assert run("%mlx_engine abort").err.startswith("UsageError: which request?")
    assert run("%mlx_engine abort --all a").err.startswith("UsageError: which request?")


def test_the_prefix_cache_is_kept_in_a_folder(run: Run, adopt: Adopt, tmp_path: Path) -> None:
    adopt()
    folder = tmp_path / "kept"
    assert run(f"%mlx_engine cache save '{folder}'").out.startswith("the prefix cache is empty")
    run("%mlx_generate -n 2 --raw abc")

    assert run(f"%mlx_engine cache save '{folder}'").out == f"the prefix cache is in {folder}\n"
    assert run("%mlx_engine cache stats").value["entry_count"] > 0
    assert run("%mlx_engine cache clear").out == "the prefix cache is empty\n"
    run("%mlx_engine cache stats -o s")
    assert run("s['entry_count']").value == 0
    assert re.fullmatch(r"\d+ prefix(es)? loaded from .*kept\n", run(f"%mlx_engine cache load {folder}").out)
    assert run("%mlx_engine cache stats").value["entry_count"] > 0
    assert "holds no saved prefix cache" in run(f"%mlx_engine cache load {tmp_path}").err


def test_cache_figures_of_an_idle_engine_are_one_line(run: Run) -> None:
    core = EngineCore(None, None, EngineConfig(idle_unload_s=0.05), backend=fake_backend())
    default_session().adopt("default", "fake", AsyncEngineCore.over(core))
    core.wait_ready(10)
    wait_until(lambda: core.get_cache_stats() is None)

    message = "the model is not in memory, and nothing is stored: ask something first"
    assert run("%mlx_engine cache stats").err == f"UsageError: {message}\n"
    assert " · unloaded · 0 running, 0 waiting" in run("%mlx_engine status").out


def test_a_missing_prefix_cache_is_named(run: Run, models: dict[str, Any]) -> None:
    run("%mlx_engine start demo --no-prefix-cache")

    assert run("%mlx_engine cache stats").err == (
        "UsageError: this engine keeps no prefix cache: it was started with --no-prefix-cache\n"
    )


def test_an_engine_is_warmed(run: Run, adopt: Adopt) -> None:
    adopt()

    assert run("%mlx_engine warm").out == "'default' is warm\n"


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, an empty cache of ours, a user without aliases."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MLX_NB_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(platformdirs, "user_config_dir", lambda name: str(tmp_path / "config"))
    return tmp_path


def test_models_lists_what_is_on_disk_and_what_runs(run: Run, adopt: Adopt, disk: Path) -> None:
    assert run("%mlx_engine models").out.startswith("no models on disk yet")
    repo = disk / "hub" / "models--org--tiny"
    make_folder(repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    adopt()

    run("%mlx_engine alias short org/tiny")
    tiny, fake = run("%mlx_engine models").out.splitlines()

    assert re.match(r"org/tiny +(float|bfloat)\d\d +.* on disk +.* in memory +alias 'short'", tiny)
    assert re.match(r"fake +running as 'default'", fake)


def test_aliases_are_made_shown_and_taken_away(run: Run, disk: Path) -> None:
    assert (
        run("%mlx_engine alias small qwen3-0.6b").out
        == "small now stands for mlx-community/Qwen3-0.6B-4bit\n"
    )
    assert re.search(r"^small +mlx-community/Qwen3-0.6B-4bit$", run("%mlx_engine alias").out, re.MULTILINE)
    assert run("%mlx_engine alias --remove small").out == "small is no alias of yours any more\n"
    assert "small " not in run("%mlx_engine alias").out
    assert run("%mlx_engine alias demo x/y").err.startswith("UsageError: 'demo' can't be an alias")


def test_the_doctor_looks_at_this_installation(run: Run) -> None:
    report = run("%mlx_engine doctor").out

    for topic in ("Python", "mlx-lm", "back end", "BLAS", "memory", "disk", "Hub"):
        assert re.search(rf"^[✓·✗] {topic} ", report, re.MULTILINE), topic


def test_statistics_are_a_value(run: Run, models: dict[str, Any]) -> None:
    run("%mlx_engine start demo")
    run("%mlx_generate -n 7 --raw abc")

    assert run("%mlx_engine stats").value["total_completion_tokens"] == 7
    assert run("%mlx_engine stats -o s").value is None
    assert run("s['num_requests_processed']").value == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("start", "which model? %mlx_engine start demo, or a Hub id, a folder, a .gguf file, an alias"),
        ("strat demo", "unknown command %mlx_engine strat: did you mean start?"),
        ("start demo --max-seqs 3", "unknown option --max-seqs: did you mean --max-num-seqs?"),
        ("start demo --max-num-seqs 0", "max_num_seqs must be at least 1, got 0"),
        ("start demo --policy fair", "policy must be one of 'fcfs', 'priority', got 'fair'"),
        ("start one two", "%mlx_engine start takes one name, got 'one two'"),
        ("stop other", "there is no engine 'other' (running: none)"),
        ("start demo --kv-group-size 64", "--kv-group-size goes with --kv-bits"),
        ("start demo --blas-threads 0 --name x y", "%mlx_engine start takes one name, got 'demo y'"),
        ("restart", "no engine is running: start one with %mlx_engine start demo (or another model)"),
        ("cache keep x", "%mlx_engine cache takes save, load, clear, stats; got 'keep'"),
        ("cache save", "%mlx_engine cache save takes one folder, got 0"),
        ("cache clear -o x", "-o is for %mlx_engine cache stats; clear has no value"),
        ("alias one", "%mlx_engine alias takes a name and a model: %mlx_engine alias small demo"),
        ("models all", "%mlx_engine models takes nothing more, got 'all'"),
        ("help strat", "unknown command %mlx_engine strat: did you mean start?"),
        ("monitor", "no engine is running: start one with %mlx_engine start demo (or another model)"),
    ],
)
def test_a_bad_line_is_refused_in_one_line(run: Run, models: dict[str, Any], line: str, message: str) -> None:
    assert run(f"%mlx_engine {line}").err == f"UsageError: {message}\n"
    assert models == {}


def test_an_unknown_model_is_refused_in_one_line(run: Run) -> None:
    ran = run("%mlx_engine start smollm")

    assert ran.err.startswith("UsageError: Unknown model 'smollm': did you mean ")
    assert default_session().engines == {}


def test_help_names_every_command_and_every_option(run: Run) -> None:
    shown = run("%mlx_engine help").out

    for command, options in COMMANDS.items():
        assert f"%mlx_engine {command} " in shown
        for flag in options.flags:
            assert re.search(rf"(?<!\S){flag}\b", shown), flag
    assert run("%mlx_engine help stop").out == COMMANDS["stop"].help() + "\n"
