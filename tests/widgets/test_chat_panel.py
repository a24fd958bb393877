"""The chat panel without a browser: what its buttons do, what is sent, what is kept, and its end."""

import gc
import json
import threading
import time
import typing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixture_fields import check_fields

import mlx_nb
from mlx_nb import AsyncEngineCore, Conversation, EngineConfig, EngineCore, SamplingParams
from mlx_nb.backends.fake import EOS, fake_backend, text_tokens
from mlx_nb.request import Request
from mlx_nb.session.session import default_session
from mlx_nb.widgets import ChatPanel
from mlx_nb.widgets import protocol as wire

FIXTURE = Path(__file__).parents[2] / "js" / "test" / "fixtures" / "protocol.json"
COMMANDS = {name: wire.ChatCommand(name) for name in typing.get_args(wire.ChatAction)}
PARSED = {
    **COMMANDS,
    "send": wire.ChatSend("Hello", None, ("load-plot.png",)),
    "edit": wire.ChatSend("Hello", "t1", ()),
    "set": wire.ChatSet({"temperature": "0.2"}),
}


def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def last_question(request: Request) -> str:
    prompt = bytes(request.prompt_token_ids).decode()
    return prompt.rsplit("user: ", 1)[1].removesuffix("\nassistant: ")


def answering(request: Request) -> Iterator[int]:
    """The question in capitals; one that says "slowly" goes on for ever, one that says "break" fails."""
    question = last_question(request)
    if "break" in question:
        raise RuntimeError("the model broke")
    if "think" in question:
        yield from text_tokens("<think>Let me see.</think>")
    yield from text_tokens(question.upper())
    while "slowly" in question:
        yield from text_tokens(" and on")
    yield EOS


def make_engine(**options: Any) -> EngineCore:
    options = {"step_s": 0.001, "script": answering, **options}
    core = EngineCore(None, None, EngineConfig(model_name="demo"), backend=fake_backend(**options))
    core.launch()
    return core


class View:
    """The other end of a panel: sends what the browser sends, and puts together what it is told."""

    def __init__(self, panel: ChatPanel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.panel = panel
        self.turns: dict[str, Any] = {}
        self.revision = 0
        self.sent: list[dict[str, Any]] = []
        send = panel.send_state

        def record(key: Any = None) -> None:
            state = panel.get_state(key=key) if key else {}
            if state:
                self.sent.append(json.loads(json.dumps(state)))
                self._take(self.sent[-1].get("talk"))
            send(key)

        monkeypatch.setattr(panel, "send_state", record)
        self.send({"kind": "view", "view": "v1", "order": 1, "open": True})

    def _take(self, talk: dict[str, Any] | None) -> None:
        if talk is None:
            return
        if talk["base"] == 0:
            self.turns = {}
        assert talk["base"] in (0, self.revision)
        self.turns |= {turn["key"]: turn for turn in talk["turns"]}
        for grown in talk["grown"]:
            turn = self.turns[grown["key"]]
            turn["answer"] += grown["answer"]
            turn["reasoning"] += grown["reasoning"]
            turn["status"] = grown["status"]
        self.turns = {key: self.turns[key] for key in talk["keys"]}
        self.revision = talk["revision"]

    def send(self, message: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self.panel._handle_custom_msg(message, buffers or [])

    def do(self, action: str) -> None:
        self.send({"kind": "chat", "action": action})

    def ask(self, text: str, replaces: str | None = None, *, wait: bool = True) -> None:
        before = list(self.turns)
        self.send({"kind": "chat_send", "text": text, "replaces": replaces, "images": []})
        assert eventually(lambda: list(self.turns) != before)
        if wait:
            assert eventually(lambda: self.idle)

    @property
    def idle(self) -> bool:
        return bool(self.panel.head["state"] != "running") and self.last["status"]["ending"] not in (
            "waiting",
            "answering",
        )

    @property
    def last(self) -> dict[str, Any]:
        turn: dict[str, Any] = list(self.turns.values())[-1]
        return turn

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(turn["question"], turn["answer"]) for turn in self.turns.values()]


@pytest.fixture
def engine() -> Iterator[EngineCore]:
    core = make_engine()
    yield core
    core.close()


@pytest.fixture
def panel(engine: EngineCore) -> Iterator[ChatPanel]:
    panel = ChatPanel(engine)
    yield panel
    panel.close()


@pytest.fixture
def view(panel: ChatPanel, monkeypatch: pytest.MonkeyPatch) -> View:
    return View(panel, monkeypatch)


def chat_threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name in ("mlx_nb chat", "mlx_nb widget")}


# -- a conversation ------------------------------------------------------------------------------------------


def test_answers_belong_to_the_conversation_and_the_next_question_knows_them(
    panel: ChatPanel, view: View
) -> None:
    view.ask("one")
    view.ask("two")
    assert view.said == [("one", "ONE"), ("two", "TWO")]
    assert [(turn.question, turn.answer) for turn in panel.conversation.turns] == view.said
    assert panel.messages == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ONE"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "TWO"},
    ]
    assert panel.figures["prompt"] == len("user: one\nassistant: ONE\nuser: two\nassistant: ")
    assert panel.figures["cached"] > 0


def test_thinking_is_told_apart(view: View) -> None:
    view.ask("think of a number")
    assert (view.last["reasoning"], view.last["answer"]) == ("Let me see.", "THINK OF A NUMBER")
    assert view.last["status"]["thought_s"] is not None


def test_stop_keeps_what_there_is(panel: ChatPanel, view: View) -> None:
    view.ask("go slowly", wait=False)
    assert eventually(lambda: "and on" in view.last["answer"])
    start = time.monotonic()
    view.do("stop")
    assert eventually(lambda: view.last["status"]["ending"] == "stopped")
    assert time.monotonic() - start < 0.3
    assert view.last["answer"].startswith("GO SLOWLY and on")
    assert panel.conversation.turns[-1].answer == view.last["answer"]
    assert eventually(lambda: panel.head["state"] == "idle")


def test_regenerate_replaces_the_last_answer(panel: ChatPanel, view: View) -> None:
    view.ask("one")
    view.ask("two")
    view.do("regenerate")
    assert eventually(lambda: view.idle and len(view.turns) == 2 and "t3" in view.turns)
    assert view.said == [("one", "ONE"), ("two", "TWO")]
    assert len(panel.conversation.turns) == 2


def test_an_edited_question_takes_the_place_of_its_turn_and_all_after_it(
    panel: ChatPanel, view: View
) -> None:
    for question in ("one", "two", "three"):
        view.ask(question)
    view.ask("zwei", replaces=list(view.turns)[1])
    assert view.said == [("one", "ONE"), ("zwei", "ZWEI")]
    assert [turn.question for turn in panel.conversation.turns] == ["one", "zwei"]


def test_what_an_edit_was_to_replace_is_there_until_it_is_answered(panel: ChatPanel, view: View) -> None:
    view.ask("one")
    view.ask("two")
    view.ask("break it", replaces=next(iter(view.turns)))
    assert view.last["status"] == {
        "ending": "failed",
        "problem": "the model broke",
        "thought_s": None,
        "left_out": 0,
    }
    assert len(panel.conversation.turns) == 2
    view.do("dismiss")
    assert eventually(lambda: view.said == [("one", "ONE"), ("two", "TWO")])


def test_a_failed_question_is_asked_again_or_edited(view: View) -> None:
    view.ask("break")
    view.do("regenerate")
    assert eventually(lambda: list(view.turns) == ["t2"] and view.idle)
    assert view.last["status"]["problem"] == "the model broke"
    view.ask("mend", replaces="t2")
    assert view.said == [("mend", "MEND")]


def test_a_question_too_long_for_the_context_says_so(
    view: View, panel: ChatPanel, engine: EngineCore
) -> None:
    view.ask("word " * 2000)
    assert "4096" in view.last["status"]["problem"] or "4,096" in view.last["status"]["problem"]
    view.ask("short")
    assert view.said == [("short", "SHORT")]


def test_turns_beyond_the_context_are_left_out_and_that_is_said(view: View, panel: ChatPanel) -> None:
    panel.conversation.add("x" * 3000, "y" * 500)
    view.ask("z" * 500)
    assert view.last["status"]["left_out"] == 1
    assert len(panel.conversation.turns) == 2


def test_a_second_question_waits_until_the_first_is_stopped(panel: ChatPanel, view: View) -> None:
    view.ask("go slowly", wait=False)
    view.send({"kind": "chat_send", "text": "two", "replaces": None, "images": []})
    assert eventually(lambda: panel.head["problem"] == "an answer is being written: stop it first")
    assert len(view.turns) == 1


def test_a_new_conversation_forgets_all_turns(panel: ChatPanel, view: View) -> None:
    view.ask("one")
    view.ask("go slowly", wait=False)
    view.do("reset")
    assert eventually(lambda: not view.turns)
    assert panel.conversation.turns == ()
    time.sleep(0.2)
    assert panel.conversation.turns == (), "the answer that was stopped does not come back"


def test_what_others_say_in_the_conversation_is_shown(panel: ChatPanel, view: View) -> None:
    view.ask("one")
    mlx_nb.chat("aside", panel.conversation, engine=panel._engine.find())
    assert eventually(lambda: view.said == [("one", "ONE"), ("aside", "ASIDE")])
    panel.conversation.undo()
    assert eventually(lambda: view.said == [("one", "ONE")])


def test_a_named_conversation_is_that_of_the_magic(engine: EngineCore) -> None:
    panel = ChatPanel(engine, "notes", system="Be brief")
    assert panel.conversation is mlx_nb.conversation("notes")
    assert panel.messages == [{"role": "system", "content": "Be brief"}]
    panel.close()


def test_images_are_refused_where_the_model_takes_text_only(panel: ChatPanel, view: View) -> None:
    view.send({"kind": "chat_send", "text": "look", "replaces": None, "images": ["a.png"]}, [b"png"])
    assert eventually(lambda: panel.head["problem"] is not None)
    assert "takes text only" in panel.head["problem"]
    assert not view.turns


# -- settings ------------------------------------------------------------------------------------------------


def test_settings_hold_from_the_next_answer_on(panel: ChatPanel, view: View, engine: EngineCore) -> None:
    view.send({"kind": "chat_set", "values": {"max_tokens": "3", "system": "Be brief"}})
    view.ask("one hundred")
    assert (view.last["answer"], view.last["status"]["ending"]) == ("ONE", "length")
    assert panel.conversation.system == "Be brief"
    assert panel.figures["output"] == 3


@pytest.mark.parametrize(
    ("name", "typed", "problem"),
    [
        ("temperature", "hot", "temperature must be a finite number, got 'hot'"),
        ("temperature", "-1", "temperature must be at least 0, got -1.0"),
        ("top_p", "0", "top_p must be above 0 and at most 1, got 0"),
        ("max_tokens", "12.5", "max_tokens must be a whole number, got 12.5"),
        ("seed", "nan", "seed must be a whole number, got nan"),
    ],
)
def test_what_is_not_valid_is_said_in_its_place(
    panel: ChatPanel, view: View, name: str, typed: str, problem: str
) -> None:
    before = panel.settings["values"][name]
    view.send({"kind": "chat_set", "values": {name: typed}})
    assert eventually(lambda: name in panel.settings["problems"])
    assert panel.settings["problems"] == {name: problem}
    assert panel.settings["values"][name] == typed
    view.ask("one")
    assert view.last["answer"] == "ONE", "the last valid value goes on to hold"
    view.send({"kind": "chat_set", "values": {name: ""}})
    assert eventually(lambda: not panel.settings["problems"])
    assert panel.settings["values"][name] == before


def test_settings_begin_as_given(engine: EngineCore) -> None:
    panel = ChatPanel(engine, params=SamplingParams(temperature=0), seed=7)
    values = panel.settings["values"]
    assert (values["temperature"], values["seed"], values["max_tokens"]) == ("0", "7", "256")
    panel.close()
    with pytest.raises(ValueError, match="unknown sampling parameter 'temprature'"):
        ChatPanel(engine, temprature=1)


# -- engines -------------------------------------------------------------------------------------------------


def test_a_stopped_engine_says_what_to_do_and_the_panel_goes_on_after_its_restart(
    panel: ChatPanel, view: View, engine: EngineCore
) -> None:
    view.ask("go slowly", wait=False)
    assert eventually(lambda: "and on" in view.last["answer"])
    engine.stop_now()
    assert eventually(lambda: view.last["status"]["ending"] == "failed")
    assert "the engine was stopped before" in view.last["status"]["problem"]
    assert "and on" in view.last["answer"]
    assert eventually(lambda: panel.head["state"] == "stopped")
    assert panel.head["problem"] == "the engine is stopped: call its launch() to start it again"
    view.ask("one")
    assert view.last["status"]["problem"] == "no engine was running: start one, then try again"
    engine.launch()
    view.do("regenerate")
    assert eventually(lambda: view.said == [("one", "ONE")])


def test_an_engine_of_the_session_is_found_by_name_or_as_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    panel, named = ChatPanel(), ChatPanel("first")
    view = View(panel, monkeypatch)
    assert panel.head["command"] == "%mlx_engine start demo"
    try:
        core = make_engine()
        default_session().adopt("first", "demo", AsyncEngineCore.over(core))
        view.ask("one")
        assert view.said == [("one", "ONE")]
        core.stop_now()
        assert eventually(lambda: panel.head["command"] == "%mlx_engine restart first")
        assert panel.head["problem"] == (
            "engine 'first' is stopped: start it again with %mlx_engine restart first"
        )
        assert named._read()["head"] == panel.head
        core.launch()
        view.ask("two")
        assert view.said[-1] == ("two", "TWO")
    finally:
        panel.close()
        named.close()
        default_session().stop_all()


def test_a_question_to_an_engine_that_still_loads_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_engine(load_s=0.6)
    panel = ChatPanel(core)
    view = View(panel, monkeypatch)
    assert panel.head["state"] == "loading"
    view.ask("one", wait=False)
    assert eventually(lambda: view.said == [("one", "ONE")])
    panel.close()
    core.close()


def test_the_panel_does_not_keep_its_engine_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_engine()
    panel = ChatPanel(core)
    view = View(panel, monkeypatch)
    view.ask("one")
    core.stop_now()
    ref = weakref.ref(core)
    del core
    gc.collect()
    assert ref() is None
    assert eventually(lambda: panel.head["problem"] is not None)
    assert panel.head["problem"].startswith("the engine is gone")
    panel.close()


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match="engine is a name or an engine"):
        ChatPanel(7)  # type: ignore[arg-type]


# -- what is sent --------------------------------------------------------------------------------------------


def test_a_streaming_answer_is_sent_as_its_growth_at_most_five_times_a_second(
    view: View, panel: ChatPanel
) -> None:
    panel.conversation.add("long " * 2000, "ago " * 2000)
    assert eventually(lambda: len(view.turns) == 1)
    view.sent.clear()
    panel.conversation.system = None
    view.ask("go slowly", wait=False)
    start = time.monotonic()
    time.sleep(1.5)
    view.do("stop")
    assert eventually(lambda: view.idle)
    elapsed = time.monotonic() - start
    assert 3 <= len(view.sent) <= elapsed * 5 + 4
    bytes_sent = sum(len(json.dumps(state)) for state in view.sent)
    assert bytes_sent < len(view.last["answer"]) + 700 * len(view.sent), "the long turn was sent once, before"
    assert view.last["answer"] == panel.conversation.turns[-1].answer


def test_nothing_is_sent_when_nobody_looks_and_the_answer_is_kept_all_the_same(
    panel: ChatPanel, view: View
) -> None:
    view.ask("go slowly", wait=False)
    view.send({"kind": "view", "view": "v1", "order": 2, "open": False})
    time.sleep(0.3)
    count = len(view.sent)
    time.sleep(0.5)
    assert len(view.sent) == count
    panel._talk.stop()
    assert eventually(lambda: len(panel.conversation.turns) == 1)


def test_a_view_that_begins_is_told_everything(panel: ChatPanel, view: View) -> None:
    view.ask("one")
    view.ask("two")
    assert panel.talk["base"] > 0
    for number, message in enumerate(
        ({"kind": "view", "view": "v2", "order": 1, "open": True}, {"kind": "chat", "action": "whole"})
    ):
        view.ask(f"more {number}")
        view.sent.clear()
        view.send(message)
        assert eventually(lambda: any(state.get("talk", {}).get("base") == 0 for state in view.sent))
        assert view.said[:2] == [("one", "ONE"), ("two", "TWO")]
        assert len(view.said) == 3 + number
    assert [turn["question"] for turn in panel.get_state()["talk"]["turns"]][:2] == ["one", "two"]


def test_every_message_of_the_browser_is_understood() -> None:
    chat = json.loads(FIXTURE.read_text(encoding="utf-8"))["chat"]
    assert {name: wire.parse_message(message) for name, message in chat["messages"].items()} == PARSED
    assert [wire.parse_message(message) for message in chat["refused"]] == [None] * len(chat["refused"])


def test_the_fixture_names_every_trait_and_field() -> None:
    chat = json.loads(FIXTURE.read_text(encoding="utf-8"))["chat"]
    check_fields(chat["traits"], wire.ChatTraits)
    check_fields(chat["growth"], wire.ChatTalk)


def test_the_traits_have_the_form_of_the_fixture(panel: ChatPanel, view: View) -> None:
    chat = json.loads(FIXTURE.read_text(encoding="utf-8"))["chat"]["traits"]
    view.ask("one")
    state = panel.get_state()
    for name, expected in chat.items():
        assert set(state[name]) == set(expected), name
    assert set(state["talk"]["turns"][0]) == set(chat["talk"]["turns"][0])
    assert set(state["settings"]["values"]) == set(chat["settings"]["values"])


# -- its end, and what stays ----------------------------------------------------------------------------------


def test_close_aborts_the_answer_and_leaves_no_thread(
    panel: ChatPanel, view: View, engine: EngineCore
) -> None:
    view.ask("go slowly", wait=False)
    assert eventually(lambda: "and on" in view.last["answer"])
    panel.close()
    assert engine.get_stats()["active_requests"] == 0
    assert eventually(lambda: not chat_threads())
    assert panel.conversation.turns[-1].answer.startswith("GO SLOWLY and on")
    panel.close()


def test_a_closed_panel_is_collectable(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = ChatPanel(engine)
    view = View(panel, monkeypatch)
    view.ask("one")
    panel.close()
    monkeypatch.undo()
    ref = weakref.ref(panel)
    del panel, view
    gc.collect()
    assert ref() is None


def test_the_fallback_is_the_conversation_escaped(engine: EngineCore) -> None:
    talk = Conversation()
    talk.add(
        "<script>alert(1)</script>",
        "Look:\n\n```html\n<img src=x onerror=alert(2)>\n```\n\n**done** <b>here</b>",
    )
    panel = ChatPanel(engine, talk)
    data, _ = panel._repr_mimebundle_()
    html = data["text/html"]
    assert "<script" not in html
    assert "<img" not in html
    assert "<b>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<code>&lt;img src=x onerror=alert(2)&gt;\n</code></pre>" in html
    assert data["text/plain"] == "Chat with demo · 1 turn · last: <script>alert(1)</script>"
    panel.close()
