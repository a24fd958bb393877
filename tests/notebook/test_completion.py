"""What Tab offers on the lines of magics, in a shell without a kernel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

from mlx_nb import EngineCore, SamplingParams, conversation

Complete = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache of one model."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--some-org--a-model-4bit").mkdir(parents=True)
    return tmp_path / "hub"


@pytest.fixture
def complete(shell: InteractiveShell) -> Complete:
    """What a cell can be completed to at its end, as whole lines."""

    def offers(code: str) -> list[str]:
        with provisionalcompleter():
            found = list(shell.Completer.completions(code, len(code)))
        last = code.rpartition("\n")[2]
        cut = len(code) - len(last)
        return [last[: each.start - cut] + each.text for each in found]

    return offers


def test_subcommands(complete: Complete) -> None:
    assert complete("%mlx_engine st") == [
        "%mlx_engine start",
        "%mlx_engine stats",
        "%mlx_engine status",
        "%mlx_engine stop",
    ]
    assert complete("x = %mlx_engine req") == ["x = %mlx_engine requests"]
    assert complete("for i in x:\n    %mlx_engine ca") == ["    %mlx_engine cache"]
    assert complete("%mlx_engine cache l") == ["%mlx_engine cache load"]
    assert complete("%mlx_engine help doc") == ["%mlx_engine help doctor"]


def test_models_are_aliases_the_demo_and_what_is_on_disk(complete: Complete) -> None:
    assert complete("%mlx_engine start de") == ["%mlx_engine start demo"]
    assert complete("%mlx_engine start some-org/a") == ["%mlx_engine start some-org/a-model-4bit"]
    assert "%mlx_engine start --name x qwen3-0.6b" in complete("%mlx_engine start --name x qwen3")
    assert complete("%mlx_engine alias mine de") == ["%mlx_engine alias mine demo"]


def test_options_that_are_not_given_yet(complete: Complete) -> None:
    assert complete("%mlx_engine start demo --max-n") == [
        "%mlx_engine start demo --max-num-batched-tokens",
        "%mlx_engine start demo --max-num-seqs",
    ]
    assert complete("%mlx_engine start demo --max-num-seqs 3 --max-n") == [
        "%mlx_engine start demo --max-num-seqs 3 --max-num-batched-tokens"
    ]
    assert complete("%%mlx_generate --temp") == ["%%mlx_generate --temperature"]
    assert complete("%mlx_generate -n 5 --se") == ["%mlx_generate -n 5 --seed"]
    assert complete("%%mlx_batch df --sy") == ["%%mlx_batch df --system"]


def test_values_of_options(complete: Complete, adopt: Callable[..., EngineCore], shell: Any) -> None:
    adopt("big")
    shell.run_cell("answer = 1")

    assert complete("%mlx_engine start demo --policy f") == ["%mlx_engine start demo --policy fcfs"]
    assert complete("%mlx_engine start demo --policy=pr") == ["%mlx_engine start demo --policy=priority"]
    assert complete("%%mlx_generate -e b") == ["%%mlx_generate -e big"]
    assert complete("%%mlx_generate -f js") == ["%%mlx_generate -f json"]
    shell.run_cell("class City: pass\ndef weather(city): pass\ndef time_in(city): pass")
    assert complete("%%mlx_generate --schema Ci") == ["%%mlx_generate --schema City"]
    assert complete("%%mlx_generate --tools weather,ti") == ["%%mlx_generate --tools weather,time_in"]
    assert complete("%%mlx_generate -o ans") == ["%%mlx_generate -o answer"]


def test_conversations(complete: Complete) -> None:
    conversation("my-plans")

    assert complete("%%mlx_chat my") == ["%%mlx_chat my-plans"]
    assert complete("%mlx_chat my-plans --un") == ["%mlx_chat my-plans --undo"]


def test_engines_and_requests(complete: Complete, adopt: Callable[..., EngineCore]) -> None:
    adopt("small")
    core = adopt("big", step_s=0.02)
    core.submit("abc", SamplingParams(max_tokens=1000), "my-request")

    assert complete("%mlx_engine use ") == ["%mlx_engine use big", "%mlx_engine use small"]
    assert complete("%mlx_engine restart s") == ["%mlx_engine restart small"]
    assert complete("%mlx_engine abort my") == ["%mlx_engine abort my-request"]


def test_variables_within_braces_and_nothing_in_the_rest_of_a_prompt(complete: Complete, shell: Any) -> None:
    shell.run_cell("import pandas as pd\ntopic = 'cats'\nframe = pd.DataFrame({'title': ['a']})")

    assert complete("%%mlx_generate -n 5\nWrite about {{ top") == ["Write about {{ topic"]
    assert complete("%mlx_generate About {{top") == ["%mlx_generate About {{topic"]
    assert complete("%%mlx_batch frame -n 5\nSum up {{ ti") == ["Sum up {{ title"]
    assert complete("%%mlx_batch fr") == ["%%mlx_batch frame"]
    assert complete("%mlx_engine stat") != complete("%mlx_generate stat")


def test_other_code_is_completed_as_before(complete: Complete) -> None:
    assert complete("import json\njson.dum") == ["json.dump", "json.dumps"]


def test_nothing_is_left_behind(shell: InteractiveShell) -> None:
    shell.run_line_magic("unload_ext", "mlx_nb")
    assert shell.Completer.custom_matchers == []

    shell.run_line_magic("load_ext", "mlx_nb")
    shell.run_line_magic("reload_ext", "mlx_nb")
    assert len(shell.Completer.custom_matchers) == 1
