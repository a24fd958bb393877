"""Conversations: what of them fits, taking turns back, and files."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_nb import Conversation, EngineCore, MlxNbError, chat, conversation
from mlx_nb.session.conversation import Turn

TURNS = [Turn(f"question {i}", f"answer {i}") for i in range(5)]


def prompt(engine: EngineCore, talk: Conversation, question: str, **options: Any) -> str:
    return engine.codec.decode(talk.fit(engine, question, **{"max_tokens": 10, **options}).tokens)


def test_the_prompt_holds_the_system_message_all_turns_and_the_question(adopt: Any) -> None:
    talk = Conversation("Be brief", TURNS[:2])

    assert prompt(adopt(), talk, "And now?") == (
        "system: Be brief\nuser: question 0\nassistant: answer 0\nuser: question 1\nassistant: answer 1\n"
        "user: And now?\nassistant: "
    )


def test_the_prefix_boundary_is_where_the_question_begins(adopt: Any) -> None:
    engine = adopt()

    fitted = Conversation("Be brief", TURNS[:1]).fit(engine, "And now?", max_tokens=10)

    assert engine.codec.decode(fitted.tokens[: fitted.prefix_boundary]).endswith("answer 0\nuser: ")


@pytest.mark.parametrize("context", range(120, 280, 5))
def test_what_does_not_fit_is_left_out_in_whole_turns_oldest_first(adopt: Any, context: int) -> None:
    engine = adopt(context_length=context)
    talk = Conversation("Be brief", TURNS)

    fitted = talk.fit(engine, "And now?", max_tokens=40)

    text = engine.codec.decode(fitted.tokens)
    kept = "".join(f"user: {t.question}\nassistant: {t.answer}\n" for t in TURNS[fitted.left_out :])
    assert text == f"system: Be brief\n{kept}user: And now?\nassistant: "
    assert len(fitted.tokens) <= context - 40
    assert talk.turns == tuple(TURNS), "nothing is forgotten"
    everything = len(prompt(adopt(name="roomy"), Conversation("Be brief", TURNS), "And now?"))
    assert (fitted.left_out > 0) == (everything > context - 40)


def test_turns_that_were_left_out_stay_out_so_that_later_prompts_begin_alike(adopt: Any) -> None:
    engine = adopt(context_length=240)
    talk = Conversation(turns=TURNS)
    before = talk.fit(engine, "And now?", max_tokens=40)

    talk.add("And now?", "this")
    after = talk.fit(engine, "Go on", max_tokens=40)

    assert before.left_out == after.left_out > 0
    assert after.tokens[: before.prefix_boundary] == before.tokens[: before.prefix_boundary]


@pytest.mark.parametrize("kv_budget", [None, 768])
def test_an_answer_that_fills_the_context_leaves_half_of_it_to_the_turns(
    adopt: Any, kv_budget: int | None
) -> None:
    engine = adopt(context_length=500, kv_budget=kv_budget)

    assert Conversation(turns=TURNS).fit(engine, "And now?", max_tokens=10_000).left_out == 0


def test_memory_bounds_a_conversation_as_the_context_does(adopt: Any) -> None:
    adopt(kv_budget=512, script=lambda request: iter(b"fine"))
    talk = Conversation(turns=TURNS * 4)

    answer = chat("And now?", talk, max_tokens=200)

    assert answer.text == "fine"
    assert answer.prompt_tokens <= 312
    assert answer.turns_left_out > 8


def test_a_model_without_a_known_context_gets_everything(adopt: Any) -> None:
    engine = adopt(context_length=None)

    assert Conversation(turns=TURNS * 50).fit(engine, "And now?", max_tokens=40).left_out == 0


def test_a_question_too_long_for_the_context_is_refused_in_one_line(adopt: Any) -> None:
    adopt(context_length=100)
    talk = Conversation(turns=TURNS)

    with pytest.raises(MlxNbError, match="the model's context ends at 100: shorten it"):
        chat("long " * 50, talk)

    assert talk.turns == tuple(TURNS)


def test_undo_takes_the_last_turn_back(adopt: Any) -> None:
    talk = Conversation(turns=TURNS[:2])

    assert talk.undo() == TURNS[1]
    assert talk.undo() == TURNS[0]
    with pytest.raises(MlxNbError, match="no turn to undo"):
        talk.undo()


def test_undo_lets_older_turns_in_again(adopt: Any) -> None:
    engine = adopt(context_length=250)
    talk = Conversation(turns=[*TURNS[:3], Turn("x" * 100, "y")])
    assert talk.fit(engine, "And now?", max_tokens=40).left_out > 0

    talk.undo()

    assert talk.fit(engine, "And now?", max_tokens=40).left_out == 0


def test_reset_forgets_the_turns_and_keeps_the_system_message() -> None:
    talk = Conversation("Be brief", TURNS)

    talk.reset()

    assert talk.messages == [{"role": "system", "content": "Be brief"}]


def test_a_name_is_always_the_same_conversation() -> None:
    assert conversation("one of the tests") is conversation("one of the tests")
    assert conversation("one of the tests") is not conversation()


def test_it_shows_what_was_said() -> None:
    talk = Conversation("Be brief", TURNS[:1])

    assert str(talk) == "system: Be brief\n\nuser: question 0\n\nassistant: answer 0"
    assert repr(talk) == "<Conversation of 1 turn>"


@pytest.mark.parametrize("system", [None, "Be brief"])
@pytest.mark.parametrize("turns", [[], TURNS, [Turn("é 😀 \n\"'", "")]])
def test_what_was_saved_is_loaded_as_it_was(tmp_path: Path, system: str | None, turns: list[Turn]) -> None:
    path = tmp_path / "new folder" / "talk.json"

    Conversation(system, turns).save(path)
    Conversation(system, turns).save(path)  # over itself

    loaded = Conversation.load(path)
    assert (loaded.system, loaded.turns) == (system, tuple(turns))
    assert [other.name for other in path.parent.iterdir()] == ["talk.json"]


def saved(**changes: Any) -> str:
    return json.dumps({"format": "mlx_nb conversation", "version": 1, "messages": [], **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        (saved()[:-5], "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[1, 2]", "holds no conversation"),
        ('{"messages": []}', "holds no conversation"),
        (saved(version=2), "has version 2 of the format and this mlx_nb reads 1: update mlx_nb"),
        (saved(messages=None), "is damaged"),
        (saved(messages=["hello"]), "is damaged"),
        (saved(messages=[{"role": "user"}]), "is damaged .'content' is missing"),
        (saved(messages=[{"role": "user", "content": 3}]), "a message is no text"),
        (saved(messages=[{"role": "user", "content": "Hi"}]), "questions and answers don't alternate"),
        (saved(messages=[{"role": r, "content": ""} for r in ("assistant", "user")]), "don't alternate"),
        (saved(messages=[{"role": r, "content": ""} for r in ("user", "tool")]), "don't alternate"),
    ],
)
def test_a_file_that_is_no_sound_conversation_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(text)

    with pytest.raises(MlxNbError, match=message) as caught:
        Conversation.load(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_can_not_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MlxNbError, match=r"can't read .*nowhere.json: No such file"):
        Conversation.load(tmp_path / "nowhere.json")
    with pytest.raises(MlxNbError, match="can't save the conversation to"):
        Conversation().save(tmp_path)


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(MlxNbError, match="is damaged"):
        Conversation.load(path)
