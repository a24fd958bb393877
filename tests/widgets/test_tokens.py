"""The token view without a browser: its numbers, what it sends while an answer grows, and what a notebook keeps."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_nb import GenerationOutput, TokenLogprob, TokensView
from mlx_nb.outputs import TokenPart
from mlx_nb.widgets.token_page import answer_text, uncertain_table
from mlx_nb.widgets.tokens import GrowingTokens

FIXTURE = Path(__file__).parents[2] / "js" / "test" / "fixtures" / "protocol.json"
EVIL = ' <img src=x onerror=alert(1)>"'


@pytest.fixture(scope="module")
def fixture() -> dict[str, Any]:
    return json.loads(FIXTURE.read_text(encoding="utf-8"))["tokens"]


def token(text: str, p: float = 0.95, part: TokenPart | None = "answer", **top: float) -> TokenLogprob:
    """A token with id 0, and alternatives by their texts."""
    known = {0: p} | {i + 1: q for i, q in enumerate(top.values())}
    texts = {0: text} | {i + 1: name for i, name in enumerate(top)}
    logprobs = {i: math.log(q) for i, q in sorted(known.items(), key=lambda pair: -pair[1])}
    return TokenLogprob(0, math.log(p), logprobs, text, part, {i: texts[i] for i in logprobs})


def said(*tokens: TokenLogprob, reason: str | None = None) -> GenerationOutput:
    return GenerationOutput("", logprobs=list(tokens), finish_reason=reason)


class Wire:
    """What a widget sends."""

    def __init__(self, widget: GrowingTokens, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[dict[str, Any]] = []
        self.states: list[Any] = []
        monkeypatch.setattr(widget, "send", lambda content, buffers=None: self.messages.append(content))
        monkeypatch.setattr(widget, "send_state", self.states.append)


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.01)
    return condition()


def test_log_probabilities_become_the_traits_of_the_fixture(fixture: dict[str, Any]) -> None:
    logprobs = [
        TokenLogprob(**entry | {"top": dict(entry["top"]), "top_texts": dict(entry["top_texts"])})
        for entry in fixture["logprobs"]
    ]
    view = TokensView(said(*logprobs, reason="stop"), title="Qwen3-8B-Instruct")
    assert {name: getattr(view, name) for name in fixture["traits"]} == fixture["traits"]
    view.close()


def test_an_answer_without_log_probabilities_says_how_to_get_them() -> None:
    with pytest.raises(ValueError, match="ask with logprobs=5, or --logprobs 5"):
        TokensView(GenerationOutput("hello"))


def test_of_equally_likely_tokens_none_was_likelier() -> None:
    view = TokensView(said(token("b", 0.4, a=0.4)))
    assert view.tokens[0]["rank"] == 1
    view.close()


def test_a_growing_answer_sends_each_token_once_and_all_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    widget = GrowingTokens("demo", 5)
    wire = Wire(widget, monkeypatch)
    tokens = [token(f" {i}") for i in range(2000)]
    widget._handle_custom_msg({"kind": "view", "view": "v", "order": 1, "open": True}, [])
    for end in range(50, 2001, 50):
        widget.take(said(*tokens[:end]))
        time.sleep(0.02)
    widget.end(said(*tokens, reason="stop"))
    sent = [message for message in wire.messages if message.get("kind") == "tokens"]
    assert [message["start"] for message in sent] == [
        sum(len(m["tokens"]) for m in sent[:i]) for i in range(len(sent))
    ]
    assert sum(len(message["tokens"]) for message in sent) == 2000
    assert 2 <= len(sent) <= 12
    assert wire.states.count("tokens") == 1
    widget.close()


def test_undecided_tokens_wait_and_stop_strings_never_show(monkeypatch: pytest.MonkeyPatch) -> None:
    widget = GrowingTokens("demo", 1)
    Wire(widget, monkeypatch)
    widget._handle_custom_msg({"kind": "view", "view": "v", "order": 1, "open": True}, [])
    widget.take(said(token("a"), token("ST", part=None)))
    assert eventually(lambda: [item["text"] for item in widget.tokens] == ["a"])
    widget.end(said(token("a"), token("ST", part="stop"), token("OP", part="stop"), reason="stop"))
    assert [item["text"] for item in widget.tokens] == ["a"]
    widget.close()


def test_a_view_that_missed_tokens_is_given_all_during_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    widget = GrowingTokens("demo", 1)
    wire = Wire(widget, monkeypatch)
    widget._handle_custom_msg({"kind": "tokens"}, [])
    assert eventually(lambda: wire.states == ["tokens"])
    widget.end(said(token("a"), reason="abort"))
    assert widget.answer["state"] == "stopped"
    widget._handle_custom_msg({"kind": "tokens"}, [])
    assert wire.states.count("tokens") == 3
    widget.close()


def test_the_snapshot_escapes_everything_and_names_alternatives() -> None:
    view = TokensView(said(token(EVIL, 0.2, **{EVIL: 0.5}), reason="stop"), title=EVIL)
    html = view._repr_mimebundle_()[0]["text/html"]  # type: ignore[index]
    assert "<img" not in html
    assert 'title="&#x27; &lt;img' in html
    assert "text-decoration:underline" in html
    view.close()


def test_as_text_it_is_the_answer_and_its_uncertain_tokens() -> None:
    view = TokensView(
        said(token("<think>", part="marker"), token("hm", part="reasoning"), token("\n\nSo", 0.2, No=0.5))
    )
    text = view._repr_mimebundle_()[0]["text/plain"]  # type: ignore[index]
    assert text.startswith("Reasoning:\nhm\n\nSo\n\n1 of 3 tokens below 30 %:\n")
    assert text.endswith("20.0 %  likelier: 'No' 50.0 %")
    assert answer_text([]) == uncertain_table([]) == ""
    view.close()
