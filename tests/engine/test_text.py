"""Answer, reasoning and tool calls are told apart the same however tokens cut the text, and however it is read."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny

from mlx_nb import EngineCore, RequestOutput, SamplingParams
from mlx_nb.backends.fake import fake_backend
from mlx_nb.backends.text import TokenizerCodec
from mlx_nb.prompts.chat import chat_tokens, messages_for

CODEC = TokenizerCodec(tiny("llama", 0, "thinks")[1], 392)
(EOS,) = CODEC.eos_token_ids
OPEN = "question<think>"
CALL = {"name": "weather", "arguments": {"city": "Paris"}}


class Told:
    """An engine whose answers are told it, in tokens that say given pieces of text."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

        def backend(config: Any, on_progress: Any) -> Any:
            made = fake_backend(lambda _: [i for piece in self._pieces for i in CODEC.encode(piece)] + [EOS])
            fake = made(config, on_progress)
            fake.codec = CODEC  # type: ignore[attr-defined]
            return fake

        self.core = EngineCore(None, None, backend=backend)
        self.core.launch()
        self.core.wait_ready(10)

    def say(self, *pieces: str, prompt: Any = "question", tools: Any = None, **params: Any) -> RequestOutput:
        self._pieces = list(pieces)
        return self.core.generate_sync(prompt, SamplingParams(**{"max_tokens": 2000} | params), tools=tools)

    def stream(self, *pieces: str, prompt: Any = "question", **params: Any) -> list[RequestOutput]:
        self._pieces = list(pieces)
        request_id = self.core.submit(prompt, SamplingParams(**{"max_tokens": 2000} | params))
        return list(self.core.stream_sync(request_id, timeout=30))


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    engine = Told()
    yield engine
    engine.core.close()


# -- whatever is said, however it is cut ----------------------------------------------------------------

PARTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", json.dumps(CALL), '{"name": "broken', "5", "[]",
    "<thi", "nk>", "</", "<", "word ", "STOP", "ST", "é", "😀", "\n",
]  # fmt: skip


@st.composite
def cut(draw: st.DrawFn) -> list[str]:
    """A text in pieces: markers split over them, or several in one."""
    whole = "".join(draw(st.lists(st.sampled_from(PARTS), max_size=12)))
    places = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    return [whole[a:b] for a, b in zip([0, *places], [*places, len(whole)], strict=True)]


def split(text: str, kind: str) -> tuple[str, str, list[Any]]:
    """Answer, reasoning and calls, by searching the whole text for one marker after the other."""
    begins = {
        "answer": ["<think>", "<tool_call>"],
        "reasoning": ["</think>", "<tool_call>"],
        "tool": ["</tool_call>"],
    }
    leads = {"<think>": "reasoning", "</think>": "answer", "<tool_call>": "tool", "</tool_call>": "answer"}
    answer = reasoning = ""
    calls: list[Any] = []
    while True:
        found = min((m for m in begins[kind] if m in text), key=text.index, default=None)
        part, _, text = text.partition(found) if found else (text, "", "")
        if kind == "reasoning":
            reasoning += part
        elif kind == "tool" and part.strip() == json.dumps(CALL):
            calls.append(CALL)
        else:
            answer += part if kind == "answer" or part.strip() else ""
        if found is None:
            return answer, reasoning, calls
        kind = leads[found]


@settings(max_examples=300, deadline=None)
@given(cut(), st.booleans())
def test_the_split_is_that_of_the_whole_text_streamed_or_not(
    told: Told, pieces: list[str], opened: bool
) -> None:
    prompt = OPEN if opened else "question"
    answer, reasoning, calls = split("".join(pieces), "reasoning" if opened else "answer")
    outputs = told.stream(*pieces, prompt=prompt)
    last = outputs[-1]
    assert (last.output_text, last.reasoning, last.tool_calls) == (answer, reasoning, calls)
    assert "".join(output.new_text for output in outputs) == answer
    assert "".join(output.new_reasoning for output in outputs) == reasoning
    whole = told.say("".join(pieces), prompt=prompt)
    assert (whole.output_text, whole.reasoning, whole.tool_calls) == (answer, reasoning, calls)
    assert whole.finish_reason == ("tool_calls" if calls else "stop")


@settings(max_examples=300, deadline=None)
@given(cut(), st.booleans(), st.sampled_from([None, ["STOP", "word ST"]]))
def test_texts_of_tokens_join_to_what_they_are_part_of(
    told: Told, pieces: list[str], opened: bool, stop: list[str] | None
) -> None:
    prompt = OPEN if opened else "question"
    plain = told.say(*pieces, prompt=prompt, stop=stop)
    output = told.say(*pieces, prompt=prompt, stop=stop, logprobs=0)
    assert (output.output_text, output.reasoning) == (plain.output_text, plain.reasoning)
    assert (output.tool_calls, output.output_token_ids) == (plain.tool_calls, plain.output_token_ids)
    assert plain.logprobs is None
    assert output.logprobs is not None
    assert [token.token_id for token in output.logprobs] == output.output_token_ids
    texts = {"answer": "", "reasoning": ""}
    for token in output.logprobs:
        assert token.part in {"answer", "reasoning", "tool", "marker", "stop"}
        texts[token.part] = texts.get(token.part, "") + token.text
    assert (texts["answer"], texts["reasoning"]) == (output.output_text, output.reasoning)


@settings(max_examples=200, deadline=None)
@given(cut(), st.booleans())
def test_stop_strings_end_the_answer_where_they_would_in_the_whole(
    told: Told, pieces: list[str], opened: bool
) -> None:
    prompt = OPEN if opened else "question"
    answer, reasoning, _ = split("".join(pieces), "reasoning" if opened else "answer")
    outputs = told.stream(*pieces, prompt=prompt, stop=["STOP", "word ST"])
    last = outputs[-1]
    expected = min((answer.split(stop)[0] for stop in ("STOP", "word ST")), key=len)
    assert last.output_text == expected == "".join(output.new_text for output in outputs)
    assert reasoning.startswith(last.reasoning)
    assert last.reasoning == reasoning or expected != answer
    assert not any("STOP" in output.output_text for output in outputs)


# -- reasoning ------------------------------------------------------------------------------------------


def test_reasoning_is_in_its_own_field_alone(told: Told) -> None:
    output = told.say("<think>let me see</think>Paris.")
    assert (output.reasoning, output.output_text, output.finish_reason) == ("let me see", "Paris.", "stop")


def test_a_prompt_that_opens_the_thinking_is_taken_into_account(told: Told) -> None:
    output = told.say("let me see</think>Paris.", prompt=OPEN)
    assert (output.reasoning, output.output_text) == ("let me see", "Paris.")


def test_several_blocks_of_thinking_are_all_reasoning(told: Told) -> None:
    output = told.say("<think>one</think>A<think>two</think>B")
    assert (output.reasoning, output.output_text) == ("onetwo", "AB")


@pytest.mark.parametrize("prompt", ["question", OPEN])
def test_thinking_that_is_never_closed_is_reasoning_to_the_end(told: Told, prompt: str) -> None:
    said = "hm and on </thi" if prompt == OPEN else "<think>hm and on </thi"
    for limit in ({}, {"max_tokens": len(CODEC.encode(said))}):
        output = told.say(said, prompt=prompt, **limit)
        assert (output.reasoning, output.output_text) == ("hm and on </thi", "")
        assert output.finish_reason == ("length" if limit else "stop")


def test_a_stop_string_in_the_reasoning_stops_nothing(told: Told) -> None:
    output = told.say("<think>a\n\nb</think>c\n\nd", stop="\n\n")
    assert (output.reasoning, output.output_text, output.finish_reason) == ("a\n\nb", "c", "stop")


def test_a_question_about_markers_opens_no_thinking(told: Told) -> None:
    messages = messages_for("What does <think> mean?")
    output = told.say("A marker.", prompt=chat_tokens(CODEC, messages))
    assert (output.reasoning, output.output_text) == ("", "A marker.")


def test_a_prompt_with_closed_thinking_opens_none(told: Told) -> None:
    for prompt in ("q<think>old</think>", chat_tokens(CODEC, messages_for("q"), thinking=False)):
        output = told.say("Paris.", prompt=prompt)
        assert (output.reasoning, output.output_text) == ("", "Paris.")


def test_hi_to_a_model_that_thinks(told: Told) -> None:
    for prompt in ("hi", chat_tokens(CODEC, messages_for("hi")), CODEC.encode("hi")[:1]):
        assert told.say("hello", prompt=prompt).output_text == "hello"


def test_a_real_model_that_thinks_answers_hi() -> None:
    engine = EngineCore(*tiny("llama", 0, "thinks"))
    engine.launch()
    output = engine.generate_sync("hi", SamplingParams(max_tokens=30, temperature=1, seed=3))
    engine.close()
    assert output.completion_tokens == 30
    assert output.output_text + output.reasoning


# -- tool calls -----------------------------------------------------------------------------------------


def test_a_tool_call_is_read_and_named_as_the_reason(told: Told) -> None:
    output = told.say(f"Let me look.<tool_call>{json.dumps(CALL)}</tool_call>")
    assert output.tool_calls == [CALL]
    assert (output.output_text, output.finish_reason) == ("Let me look.", "tool_calls")
    assert output.finished


def test_several_calls_come_in_order(told: Told) -> None:
    calls = [CALL | {"arguments": {"n": n}} for n in range(3)]
    output = told.say("".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>\n" for call in calls))
    assert output.tool_calls == calls


def test_a_call_straight_from_the_thinking_is_one(told: Told) -> None:
    output = told.say(f"hm<tool_call>{json.dumps(CALL)}</tool_call>", prompt=OPEN)
    assert (output.reasoning, output.tool_calls, output.finish_reason) == ("hm", [CALL], "tool_calls")


@pytest.mark.parametrize(
    "block", ["{nope", "5", "[]", '"weather"', '{"city": "Paris"}', '[{"name": "a"}, 3]', '{"name": 4}']
)
def test_a_malformed_block_stays_in_the_text(told: Told, block: str) -> None:
    output = told.say(f"a <tool_call>{block}</tool_call> b")
    assert (output.output_text, output.tool_calls) == (f"a {block} b", [])
    assert output.finish_reason == "stop"


def test_a_call_without_arguments_has_none(told: Told) -> None:
    output = told.say('<tool_call>{"name": "now"}</tool_call>')
    assert output.tool_calls == [{"name": "now", "arguments": {}}]


def test_a_call_that_was_cut_off_stays_in_the_text(told: Told) -> None:
    output = told.say('a <tool_call>{"name": "wea')
    assert (output.output_text, output.tool_calls) == ('a {"name": "wea', [])
    closed_by_the_end = told.say(f"a <tool_call>{json.dumps(CALL)}")
    assert (closed_by_the_end.output_text, closed_by_the_end.tool_calls) == ("a ", [CALL])


# -- the beginning --------------------------------------------------------------------------------------


def test_a_bos_is_there_exactly_once() -> None:
    codec = TokenizerCodec(tiny("llama", 0, "begins")[1], 400)
    bos = codec.chat_tokenizer.bos_token
    (marker,) = [i for i in range(3) if codec.decode([i]) == bos]
    for tokens in (
        codec.encode("plain text"),
        codec.encode(f"{bos}text that has one"),
        codec.encode(codec.chat_tokenizer.apply_chat_template(messages_for("hi"), tokenize=False)),
        chat_tokens(codec, messages_for("hi", system="be brief")),
    ):
        assert tokens.count(marker) == 1
        assert tokens[0] == marker


def test_without_a_bos_none_is_made_up() -> None:
    assert CODEC.decode(CODEC.encode("plain text")) == "plain text"
