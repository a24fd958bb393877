"""``%mlx_engine`` in a shell without a kernel."""

from collections.abc import Callable
from typing import Any

import pytest

from mlx_nb import AsyncEngineCore, EngineConfig, EngineCore, ModelLoadError
from mlx_nb.backends.fake import fake_backend
from mlx_nb.session.session import default_session

Run = Callable[[str], Any]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every MODEL is a fake, except "broken"; what an engine was started with is found under its model."""
    started: dict[str, Any] = {}

    def from_pretrained(model: str, config: EngineConfig, **options: Any) -> AsyncEngineCore:
        started[model] = (config, options)
        make = broken if model == "broken" else fake_backend(load_s=0.05)
        return AsyncEngineCore.over(EngineCore(None, None, config, backend=make))

    def broken(config: EngineConfig, on_progress: Any) -> Any:
        raise ModelLoadError("broken has no weights: download it again")

    monkeypatch.setattr(AsyncEngineCore, "from_pretrained", from_pretrained)
    return started


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


def test_options_reach_the_engine(run: Run, models: dict[str, Any]) -> None:
    run(
        "%mlx_engine start demo --max-num-seqs 3 --max-num-batched-tokens 99 --no-prefix-cache"
        " --policy priority --adapter 'my adapter' --trust-remote-code"
    )

    config, options = models["demo"]
    scheduler = config.scheduler_config
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (3, 99)
    assert (scheduler.enable_prefix_cache, scheduler.policy) == (False, "priority")
    assert (options["adapter_path"], options["trust_remote_code"]) == ("my adapter", True)


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


def test_a_failed_start_is_one_line_and_leaves_nothing(run: Run, models: dict[str, Any]) -> None:
    run("%mlx_engine start one")

    failed = run("%mlx_engine start broken --name second")

    assert failed.err == "UsageError: broken has no weights: download it again\n"
    assert list(default_session().engines) == ["default"]
    assert default_session().current is default_session().engines["default"]
    assert run("%mlx_generate -n 2 --raw abc").value == "ab"


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


def test_help_names_every_command(run: Run) -> None:
    shown = run("%mlx_engine help").out

    for command in ("start", "status", "stop", "list", "stats", "monitor", "help"):
        assert f"%mlx_engine {command} " in shown
