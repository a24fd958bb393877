"""Structured output: what ends by itself is valid, in any company, after thinking, after making room for others."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from models import Kind, tiny
from pydantic import BaseModel, Field

from mlx_nb import EngineConfig, EngineCore, RequestError, SamplingParams, SchedulerConfig
from mlx_nb.backends.batch import BatchBackend
from mlx_nb.footprint import KVFootprint
from mlx_nb.session.session import to_generation

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "born": {"type": "integer", "minimum": 0, "maximum": 2000},
        "tags": {"type": "array", "items": {"enum": ["poet", "engine"]}, "maxItems": 3},
        "known": {"type": "boolean"},
    },
    "required": ["name", "born", "tags"],
    "additionalProperties": False,
}
CHOICES = ["yes", "yes please", 'no "quotes"', "back\\slash", "two\nlines", "ünï😀"]
LARK = 'start: "x" ("," NUMBER)+ ";"\nNUMBER: /[0-9]{1,2}/'


class Person(BaseModel):
    """Somebody, with a bound that JSON schema knows as well."""

    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=150)


def is_person_record(text: str) -> bool:
    value = json.loads(text)
    assert set(SCHEMA["required"]) <= set(value) <= set(SCHEMA["properties"])
    tags = value["tags"]
    return (
        len(value["name"]) <= 8
        and 0 <= value["born"] <= 2000
        and len(tags) <= 3
        and set(tags) <= {"poet", "engine"}
        and isinstance(value.get("known", True), bool)
    )


CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "schema": ({"schema": SCHEMA}, is_person_record),
    "JSON text": ({"schema": json.dumps(SCHEMA)}, is_person_record),
    "Pydantic": ({"schema": Person}, Person.model_validate_json),
    "regex": ({"regex": "[ab]{2,5}c[0-9]"}, re.compile("[ab]{2,5}c[0-9]").fullmatch),
    "choices": ({"choices": CHOICES}, CHOICES.__contains__),
    "Lark": ({"grammar": LARK}, re.compile("x(,[0-9]{1,2})+;").fullmatch),
}


def hot(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 1.0, "top_p": 1.0, "seed": seed} | changes)


@pytest.fixture
def start() -> Iterator[Any]:
    engines = []

    def started(kind: Kind = "plain", family: str = "llama", **scheduler: Any) -> EngineCore:
        config = EngineConfig(scheduler_config=SchedulerConfig(**scheduler))
        engine = EngineCore(*tiny(family, 0, kind), config)
        engines.append(engine)
        engine.launch()
        engine.wait_ready(30)
        return engine

    yield started
    for engine in engines:
        engine.close()


# -- whatever is drawn ----------------------------------------------------------------------------------


def test_every_kind_gives_valid_answers_in_one_batch_with_free_rows(start: Any) -> None:
    params, valid = [], []
    for seed in range(12):
        for changes, check in CONSTRAINTS.values():
            params.append(hot(seed, **changes))
            valid.append(check)
        params.append(hot(seed, max_tokens=20))
        valid.append(lambda _: True)
    engine = start()
    outputs = engine.generate_batch_sync(["Ada"] * len(params), params)
    free = engine.generate_sync("Ada", hot(3, max_tokens=20))
    assert outputs[4 * 7 - 1].output_token_ids == free.output_token_ids
    ended = [0] * len(CONSTRAINTS)
    for place, (output, wanted, check) in enumerate(zip(outputs, params, valid, strict=True)):
        parsed = to_generation(output, wanted).parsed
        if output.finish_reason == "stop":
            assert check(output.output_text), output.output_text
            if wanted.constraint:
                assert parsed is not None
                ended[place % 7] += 1
        else:
            assert output.finish_reason == "length"
            assert parsed is None
    assert min(ended) > 3


def test_parsed_is_the_value_that_was_asked_for(start: Any) -> None:
    engine = start()
    params = [hot(2, **changes) for changes, _ in CONSTRAINTS.values()]
    outputs = engine.generate_batch_sync(["Ada"] * len(params), params)
    parsed = [to_generation(*pair).parsed for pair in zip(outputs, params, strict=True)]
    assert [type(value) for value in parsed] == [dict, dict, Person, str, str, str]
    assert parsed[0] == json.loads(outputs[0].output_text)
    assert [outputs[3].output_text, outputs[4].output_text, outputs[5].output_text] == parsed[3:]


def test_an_answer_that_is_cut_off_says_so_and_is_not_parsed(start: Any) -> None:
    params = hot(0, max_tokens=5, schema=SCHEMA)
    output = start().generate_sync("Ada", params)
    assert (output.finish_reason, output.completion_tokens) == ("length", 5)
    assert to_generation(output, params).parsed is None


def test_a_complete_answer_at_its_very_limit_is_still_one(start: Any) -> None:
    engine = start()
    output = engine.generate_sync("q", hot(0, regex="[ab]{4}c"))
    again = engine.generate_sync("q", hot(0, regex="[ab]{4}c", max_tokens=output.completion_tokens + 1))
    assert (again.output_text, again.finish_reason) == (output.output_text, "stop")


def test_white_space_between_json_parts_is_bounded(start: Any) -> None:
    engine = start()
    spaces = {
        token: 50.0
        for token in range(engine.codec.vocabulary_size)
        if engine.codec.decode([token]).strip() == "" and engine.codec.decode([token])
    }
    assert spaces
    flags = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
    }
    params = hot(0, schema=flags | {"additionalProperties": False}, logit_bias=spaces)
    output = engine.generate_sync("q", params)
    assert output.finish_reason == "stop"
    assert re.fullmatch(r'\{"a": (true|false), "b": (true|false)\}', output.output_text)


def test_greedy_and_logprobs_work_under_a_grammar(start: Any) -> None:
    params = hot(0, temperature=0, regex="[ab]{4}c", logprobs=2)
    first, second = start().generate_batch_sync(["q", "q"], [params, params])
    assert first.output_token_ids == second.output_token_ids
    assert first.logprobs is not None
    # The model's own, before the mask.
    assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in first.logprobs)


def test_a_users_processor_works_beside_a_grammar_and_its_fault_is_its_own(start: Any) -> None:
    engine = start()
    letter_b = engine.codec.encode("b")[0]

    def prefer_b(_: Any, logits: mx.array) -> mx.array:
        return mx.where(mx.arange(logits.shape[-1]) == letter_b, logits + 100, logits)

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("mine")

    params = [
        hot(0, regex="[ab]{4}c", logits_processors=[prefer_b]),
        hot(0, regex="[ab]{4}c", logits_processors=[fail]),
        hot(0, regex="[ab]{4}c"),
    ]
    outputs = engine.generate_batch_sync(["q"] * 3, params, errors="return")
    assert outputs[0].output_text == "bbbbc"
    assert isinstance(outputs[1].error, ZeroDivisionError)
    assert outputs[2].finish_reason == "stop"


# -- seeds, prefixes, and room for others ---------------------------------------------------------------


def test_a_seed_gives_the_same_answer_in_company_and_after_a_cache_hit(start: Any) -> None:
    engine = start(family="qwen3_5")
    params = [hot(7, **changes) for changes, _ in CONSTRAINTS.values()]
    alone = [engine.generate_sync("A tiny prompt", each).output_token_ids for each in params]
    together = engine.generate_batch_sync(["A tiny prompt"] * len(params), params)
    assert together[0].cached_tokens > 0
    assert [output.output_token_ids for output in together] == alone


def test_rows_that_made_room_go_on_within_their_grammar() -> None:
    resumed: list[int] = []

    class Small(BatchBackend):
        def insert(self, request: Any, made: Any = ()) -> None:
            if made:
                resumed.append(len(made))
            super().insert(request, made)

    def backend(config: Any, _: Any) -> Small:
        small = Small(*tiny("llama", 0, "thinks"), config)
        small.footprint, small.kv_budget = KVFootprint(per_token=1), 3 * 256
        return small

    engine = EngineCore(None, None, backend=backend)
    engine.launch()
    engine.wait_ready(30)
    digits = hot(1, regex="[0-9]{80}", thinking=False)
    thinks = hot(2, regex="[a-z]{60}", logit_bias={engine.codec.encode("</think>")[0]: 3.0})
    # The first is admitted beside the others; once it is longer than 256, they must wait.
    prompts = [[5] * 215, "some digits", "think<think>"]
    outputs = engine.generate_batch_sync(prompts, [hot(0, ignore_eos=True), digits, thinks])
    alone = [engine.generate_sync(*pair) for pair in zip(prompts[1:], (digits, thinks), strict=True)]
    engine.close()
    assert len(resumed) == 2
    assert [o.output_token_ids for o in outputs[1:]] == [o.output_token_ids for o in alone]
    assert re.fullmatch("[0-9]{80}", outputs[1].output_text)
    assert re.fullmatch("[a-z]{60}", outputs[2].output_text)
    assert outputs[2].reasoning


# -- with a model that thinks ---------------------------------------------------------------------------


def scripted(engine: EngineCore, text: str) -> Any:
    """A processor that makes the model say `text` first; what follows is the model's own, or the grammar's."""
    tokens = iter(engine.codec.encode(text))

    def say(_: Any, logits: mx.array) -> mx.array:
        token = next(tokens, None)
        return logits if token is None else mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)[None]

    return say


@pytest.mark.parametrize("thought", ["hm", "", "a <tool_call>{} of mine</tool_call>", "<think>twice"])
def test_the_grammar_begins_after_the_thinking_that_the_model_opens(thought: str, start: Any) -> None:
    engine = start("thinks")
    say = scripted(engine, f"<think>{thought}</think>")
    output = engine.generate_sync("q", hot(0, regex="[ab]{4}c", logits_processors=[say]))
    assert output.reasoning == thought
    assert re.fullmatch("[ab]{4}c", output.output_text)
    assert (output.finish_reason, output.tool_calls) == ("stop", [])


def test_the_grammar_begins_after_the_thinking_that_the_prompt_opens(start: Any) -> None:
    engine = start("thinks")
    say = scripted(engine, "hm</think>")
    output = engine.generate_sync("q<think>", hot(0, choices=CHOICES, logits_processors=[say]))
    assert (output.reasoning, output.finish_reason) == ("hm", "stop")
    assert output.output_text in CHOICES


def test_a_closing_marker_spelled_in_other_tokens_closes_as_well(start: Any) -> None:
    engine = start("thinks")
    spelled = [token for letter in "</think>" for token in engine.codec.encode(letter)]
    assert len(spelled) == 8

    def say(tokens: mx.array, logits: mx.array) -> mx.array:
        made = tokens.size - 2
        return (
            logits
            if made >= 8
            else mx.where(mx.arange(logits.shape[-1]) == spelled[made], 0.0, -mx.inf)[None]
        )

    prompt = engine.codec.encode("q<think>")
    assert len(prompt) == 2
    output = engine.generate_sync(prompt, hot(0, regex="[ab]{4}c", logits_processors=[say]))
    assert output.reasoning == ""
    assert re.fullmatch("[ab]{4}c", output.output_text)


def test_without_thinking_the_grammar_begins_at_once(start: Any) -> None:
    engine = start("thinks")
    opens = {engine.codec.encode("<think>")[0]: 100.0}
    for prompt in ("q", "q<think>", "q<think>\n\n</think>\n\n"):
        output = engine.generate_sync(prompt, hot(0, regex="[ab]{4}c", thinking=False, logit_bias=opens))
        assert re.fullmatch("[ab]{4}c", output.output_text)
        assert output.reasoning == ""


def test_thinking_that_never_ends_leaves_no_answer(start: Any) -> None:
    engine = start("thinks")
    never = {engine.codec.encode("</think>")[0]: -100.0}
    params = hot(0, schema=SCHEMA, max_tokens=20, logit_bias=never)
    output = engine.generate_sync("q<think>", params)
    assert (output.output_text, output.finish_reason) == ("", "length")
    assert output.reasoning
    assert to_generation(output, params).parsed is None


LIKE_MARKERS = '"a <think> and a <tool_call> in it"'


@pytest.mark.parametrize(
    "changes",
    [
        {"grammar": f"start: {json.dumps(LIKE_MARKERS)}"},
        {"regex": LIKE_MARKERS},
        {"choices": [LIKE_MARKERS]},
        {"schema": {"const": LIKE_MARKERS.strip('"')}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_looks_like_a_marker_inside_an_answer_stays_in_it(changes: Any, start: Any) -> None:
    output = start("thinks").generate_sync("q", hot(0, thinking=False, max_tokens=200, **changes))
    assert (output.output_text, output.reasoning, output.tool_calls) == (LIKE_MARKERS, "", [])


# -- what is refused ------------------------------------------------------------------------------------

NONSENSE = {
    "a schema of an unknown type": {"schema": {"type": "nonsense"}},
    "a schema that is no JSON": {"schema": {"enum": {1, 2}}},
    "a schema that nothing fits": {"schema": {"not": {}}},
    "a schema elsewhere": {"schema": {"$ref": "https://example.com/schema.json"}},
    "a regex with an error": {"regex": "(["},
    "a regex that looks ahead": {"regex": "(?=a)b"},
    "a grammar without a rule": {"grammar": "start: missing"},
    "a grammar that is none": {"grammar": "nonsense"},
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_in_one_line_before_it_is_queued(case: str, start: Any) -> None:
    engine = start()
    with pytest.raises(RequestError, match="can't be used") as refused:
        engine.generate_sync("q", hot(0, **NONSENSE[case]))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert engine.get_stats()["num_requests_processed"] == 0
    assert engine.generate_sync("q", hot(0, regex="ab")).output_text == "ab"
