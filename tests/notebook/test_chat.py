"""``%%mlx_chat`` in a shell without a kernel."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import tiny
from scripts import wait_until

from mlx_nb import AsyncEngineCore, Conversation, EngineCore, chat, conversation
from mlx_nb.backends.fake import text_tokens
from mlx_nb.session.session import default_session

Run = Callable[[str], Any]
Adopt = Callable[..., EngineCore]


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Conversations outlive a shell: these tests' begin empty."""
    for name in ("default", "travel", "cooking"):
        conversation(name).reset()
        conversation(name).system = None


@pytest.fixture
def seen(adopt: Adopt) -> list[str]:
    """Every prompt that an engine gets; its answers are numbered."""
    prompts: list[str] = []

    def script(request: Any) -> list[int]:
        prompts.append(bytes(request.prompt_token_ids).decode())
        return text_tokens(f"answer {len(prompts)}")

    adopt(script=script)
    return prompts


def test_later_turns_know_the_earlier_ones(run: Run, seen: list[str]) -> None:
    first = run("%%mlx_chat\nHello there\n\n")
    second = run("%%mlx_chat -n 20 -t 0\nGo on?")

    assert (first.value, second.value) == ("answer 1", "answer 2")
    assert seen == [
        "user: Hello there\nassistant: ",
        "user: Hello there\nassistant: answer 1\nuser: Go on?\nassistant: ",
    ]
    assert "answer 1\n(8 tokens · " in first.out


def test_each_name_is_a_conversation_of_its_own_wherever_it_stands(run: Run, seen: list[str]) -> None:
    run("%%mlx_chat travel\nOne")
    run("%%mlx_chat cooking -n 9\nTwo")
    run("%%mlx_chat --seed 3 travel\nThree")

    assert seen[1:] == [
        "user: Two\nassistant: ",
        "user: One\nassistant: answer 1\nuser: Three\nassistant: ",
    ]


def test_the_system_message_stays_until_it_is_replaced(run: Run, seen: list[str]) -> None:
    run("who = 'a cook'")
    run("%%mlx_chat --system 'You are {{ who }}'\nOne")
    run("%%mlx_chat\n{{ who }} {who}")
    run("%%mlx_chat --system ''\nThree")

    assert seen[0] == "system: You are a cook\nuser: One\nassistant: "
    assert seen[1].startswith("system: You are a cook\nuser: One\n")
    assert seen[1].endswith("user: a cook {who}\nassistant: ")
    assert seen[2].startswith("user: One\n")


def test_a_new_conversation_takes_the_default_system_message(run: Run, seen: list[str]) -> None:
    run("%config MlxMagics.system = 'Be kind'")
    run("%%mlx_chat\nOne")
    run("%config MlxMagics.system = ''")

    assert seen == ["system: Be kind\nuser: One\nassistant: "]


def test_undo_takes_the_last_turn_back_alone_or_before_a_question(run: Run, seen: list[str]) -> None:
    run("%%mlx_chat\nOne")
    run("%%mlx_chat\nTwo")

    ran = run("%mlx_chat --undo")
    run("%%mlx_chat --undo\nOne, better")

    assert ran.out == "taken back: Two\n"
    assert seen[-1] == "user: One, better\nassistant: "
    assert [turn.question for turn in conversation().turns] == ["One, better"]


def test_reset_and_undo_exclude_each_other_and_change_nothing(run: Run, seen: list[str]) -> None:
    run("%%mlx_chat\nOne")

    ran = run("%%mlx_chat --reset --undo\nTwo")

    assert ran.err == "UsageError: --reset forgets the last turn as well: leave --undo out\n"
    assert [turn.question for turn in conversation().turns] == ["One"]


def test_reset_forgets_the_turns(run: Run, seen: list[str]) -> None:
    run("%%mlx_chat travel\nOne")
    run("%%mlx_chat\nOne")

    ran = run("%mlx_chat travel --reset")
    run("%%mlx_chat travel\nTwo")

    assert ran.out == "1 turn forgotten\n"
    assert seen[-1] == "user: Two\nassistant: "
    assert len(conversation().turns) == 1


def test_show_shows_the_conversation(run: Run, seen: list[str]) -> None:
    run("%%mlx_chat --system 'Be brief'\nOne")

    assert run("%mlx_chat --show").out == "system: Be brief\n\nuser: One\n\nassistant: answer 1\n"


def test_a_saved_conversation_goes_on_under_any_name(run: Run, seen: list[str], tmp_path: Path) -> None:
    path = tmp_path / "my talk.json"
    saved = run(f"%%mlx_chat --system 'Be brief' --save '{path}'\nOne")
    loaded = run(f"%mlx_chat travel --load '{path}'")
    run("%%mlx_chat travel\nTwo")

    assert saved.out.endswith(f"1 turn saved to {path}\n") or f"1 turn saved to {path}\n" in saved.out
    assert loaded.out == f"1 turn loaded from {path}\n"
    assert json.loads(path.read_text())["version"] == 1
    assert seen[-1] == "system: Be brief\nuser: One\nassistant: answer 1\nuser: Two\nassistant: "
    assert len(conversation().turns) == 1, "the saved one is another"


def test_the_answer_goes_into_a_variable(run: Run, seen: list[str]) -> None:
    ran = run("%%mlx_chat -o reply\nOne")

    assert ran.value is None
    assert run("reply.text").value == "answer 1"


def test_python_and_magics_share_conversations(run: Run, seen: list[str]) -> None:
    run("%%mlx_chat travel\nOne")
    chat("Two", "travel")

    assert seen[-1] == "user: One\nassistant: answer 1\nuser: Two\nassistant: "


def test_turns_that_do_not_fit_are_left_out_and_the_finish_line_says_so(run: Run, adopt: Adopt) -> None:
    adopt(context_length=200, script=lambda request: text_tokens("fine"))
    notes = [run(f"%%mlx_chat -n 20\n{'long ' * 9}{i}").out for i in range(6)]

    assert "left out" not in notes[0] + notes[1]
    assert "oldest turns left out" in notes[-1]
    assert len(conversation().turns) == 6
    assert run("_.output.turns_left_out").value == conversation().left_out > 0
    assert any("1 oldest turn left out" in note or "2 oldest turns left out" in note for note in notes)


def test_a_turn_that_fails_is_no_part_of_the_conversation(run: Run, adopt: Adopt) -> None:
    def script(request: Any) -> Any:
        yield from text_tokens("abc")
        raise RuntimeError("the model broke")

    adopt(script=script, step_s=0.02)

    ran = run("%%mlx_chat\nOne")

    assert ran.err == "UsageError: the engine reports RuntimeError: the model broke\n"
    assert conversation().turns == ()


def test_an_answer_aborted_half_way_is_kept_and_undo_drops_it(run: Run, adopt: Adopt) -> None:
    engine = adopt(script=lambda request: iter(lambda: ord("x"), None), step_s=0.005)
    import threading

    def abort() -> None:
        wait_until(lambda: engine.get_stats()["total_completion_tokens"] > 3)
        engine.abort_all()

    thread = threading.Thread(target=abort)
    thread.start()
    run("%%mlx_chat -n 100000\nOne")
    thread.join()

    (turn,) = conversation().turns
    assert turn.answer.startswith("xxx")
    assert run("%mlx_chat --undo").out == "taken back: One\n"
    assert conversation().turns == ()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "%mlx_chat",
            "the question goes into the cell below %%mlx_chat; a line takes --show, --undo, --reset",
        ),
        ("%mlx_chat Hello there", "a conversation has one name, got 'Hello there'"),
        ("%%mlx_chat travel plans\nOne", "a conversation has one name, got 'travel plans'"),
        ("%mlx_chat --panel", "the panel needs a notebook; %%mlx_chat works here"),
        ("%mlx_chat --undo", "the conversation has no turn to undo"),
        ("%mlx_chat --load nowhere.json", "can't read nowhere.json: No such file or directory"),
        ("%mlx_chat --load a --reset", "--load brings other turns: leave --reset out"),
        ("%%mlx_chat --shw\nOne", "unknown option --shw: did you mean --show?"),
        ("%%mlx_chat -n -1\nOne", "max_tokens must be at least 0, got -1"),
        ("%%mlx_chat -e other\nOne", "there is no engine 'other' (running: default)"),
        ("%%mlx_chat\n{{ nam }}", "the prompt uses {{ nam }}, and there is no variable 'nam'"),
    ],
)
def test_what_can_not_be_done_is_one_line(run: Run, seen: list[str], code: str, message: str) -> None:
    ran = run(code)

    assert ran.err.startswith(f"UsageError: {message}")
    assert ran.err.count("\n") == 1
    assert seen == []
    assert conversation().turns == ()


def test_a_refused_cell_changes_nothing(run: Run, seen: list[str]) -> None:
    run("%%mlx_chat --system 'Be brief'\nOne")

    run("%%mlx_chat --undo --system 'Be kind' -n -1\nTwo")
    run("%%mlx_chat --reset --system 'Be kind' -e other\nTwo")

    assert len(conversation().turns) == 1
    assert conversation().system == "Be brief"


def test_help_names_the_options(run: Run) -> None:
    ran = run("%mlx_chat?")

    assert "--save FILE" in ran.out
    assert "--max-tokens N" in ran.out


def test_unloading_takes_it_out(run: Run, shell: Any) -> None:
    shows = shell.display_formatter.formatters["text/markdown"]
    assert "*no turns yet*" in shows(Conversation())

    run("%unload_ext mlx_nb")

    assert "mlx_chat" not in shell.magics_manager.magics["cell"]
    assert shows(Conversation()) is None
    run("%load_ext mlx_nb")


def test_later_turns_reuse_the_prefix_cache_of_a_real_model(run: Run) -> None:
    core = EngineCore(*tiny())
    default_session().adopt("default", "tiny", AsyncEngineCore.over(core))

    first = run("%%mlx_chat -n 8 -t 0\nCount to ten.").value
    second = run("%%mlx_chat -n 8 -t 0\nAnd back again.")

    assert first.output.cached_tokens == 0
    assert second.value.output.cached_tokens > 0
    assert "prompt tokens cached" in second.out
