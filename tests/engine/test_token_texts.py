"""With log-probabilities come the texts of the tokens and of their alternatives."""

import threading
from collections.abc import Callable, Iterator

import pytest
from models import tiny

from mlx_nb import EngineCore, RequestOutput, SamplingParams, TokenLogprob
from mlx_nb.backends.fake import fake_backend, text_tokens
from mlx_nb.backends.text import TokenizerCodec
from mlx_nb.engine.token_texts import TokenTexts

Say = Callable[..., RequestOutput]


@pytest.fixture
def say() -> Say:
    """Have an engine whose tokens are bytes say a text."""

    def answer(text: str, **params: object) -> RequestOutput:
        core = EngineCore(None, None, backend=fake_backend(lambda _: text_tokens(text)))
        core.launch()
        try:
            return core.generate_sync("question", SamplingParams(**({"logprobs": 1} | params)))  # type: ignore[arg-type]
        finally:
            core.close()

    return answer


def told(output: RequestOutput) -> list[tuple[str, str | None]]:
    assert output.logprobs is not None
    return [(token.text, token.part) for token in output.logprobs]


def test_a_character_is_the_text_of_the_token_that_completes_it(say: Say) -> None:
    assert told(say("aé😀")) == [("a", "answer"), ("", "answer"), ("é", "answer")] + [("", "answer")] * 3 + [
        ("😀", "answer")
    ]


def test_markers_are_told_from_what_stands_between_them(say: Say) -> None:
    parts = told(say("<think>hm</think>é"))
    assert parts[:7] == [(letter, "marker") for letter in "<think>"]
    assert parts[7:9] == [("h", "reasoning"), ("m", "reasoning")]
    assert parts[9:17] == [(letter, "marker") for letter in "</think>"]
    assert parts[17:] == [("", "answer"), ("é", "answer")]


def test_a_stop_string_is_in_no_text(say: Say) -> None:
    output = say("ab STOP", stop=["STOP"])
    assert output.output_text == "ab "
    assert told(output) == [(letter, "answer") for letter in "ab "] + [(letter, "stop") for letter in "STOP"]


def test_a_call_is_apart_and_what_is_no_call_is_answer(say: Say) -> None:
    call = '{"name": "f", "arguments": {}}'
    assert told(say(f"<tool_call>{call}</tool_call>"))[11 : 11 + len(call)] == [(c, "tool") for c in call]
    assert told(say("<tool_call>oops</tool_call>"))[11:15] == [(letter, "answer") for letter in "oops"]


def test_what_is_held_back_is_not_decided_until_it_is_shown() -> None:
    looked = threading.Event()

    def script(_: object) -> Iterator[int]:
        yield from text_tokens("ab STO")
        looked.wait(10)
        yield from text_tokens(" no")

    core = EngineCore(None, None, backend=fake_backend(script))
    core.launch()
    request = core.submit("question", SamplingParams(logprobs=0, stop=["STOP"]))
    outputs = []
    for output in core.stream_sync(request, timeout=30):
        outputs.append(output)
        if len(output.output_token_ids) == 6:
            assert output.output_text == "ab "
            assert told(output) == [(letter, "answer") for letter in "ab "] + [("", None)] * 3
            looked.set()
    core.close()
    assert looked.is_set()
    assert told(outputs[-1]) == [(letter, "answer") for letter in "ab STO no"]


def test_an_aborted_answer_has_all_its_texts() -> None:
    core = EngineCore(None, None, backend=fake_backend(step_s=0.01))
    core.launch()
    request = core.submit("abc<", SamplingParams(logprobs=0, max_tokens=10_000))
    outputs = []
    for output in core.stream_sync(request, timeout=30):
        outputs.append(output)
        if len(outputs) == 8:
            core.abort(request)
    core.close()
    assert outputs[-1].finish_reason == "abort"
    assert "".join(text for text, part in told(outputs[-1]) if part == "answer") == outputs[-1].output_text


def test_alternatives_have_the_space_that_they_would_have_written() -> None:
    codec = TokenizerCodec(tiny("llama", 0)[1], 392)
    ids = codec.encode("one two three")
    texts = TokenTexts(codec, ids[0])
    for token in ids:
        texts.add(TokenLogprob(token, -1.0, {token: -1.0, ids[0]: -2.0}))
    for index, token in enumerate(texts.logprobs[1:], start=1):
        grown = codec.decode(ids[: index + 1])[len(codec.decode(ids[:index])) :]
        assert token.top_texts[ids[index]] == grown
        assert list(token.top_texts) == list(token.top)
