"""Every field of SamplingParams is checked once, with one line that names it."""

from typing import Any

import numpy as np
import pytest

from mlx_nb import RequestOutput, RequestStatus, SamplingParams

BAD: list[tuple[str, Any]] = [
    ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", None), ("max_tokens", "3"),
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
    ("top_p", 0), ("top_p", 1.1), ("top_p", -1), ("top_k", -1), ("top_k", 2.0), ("min_p", -0.1), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3), ("frequency_penalty", None),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_window", 0), ("repetition_window", 1.5),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5), ("stop", [None]),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 5),
    ("seed", -1), ("seed", 1.0), ("seed", 2**64), ("logprobs", -1), ("logprobs", 65), ("logprobs", True),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: "x"}), ("logit_bias", [1]),
    ("logit_bias", {1: float("nan")}), ("logit_bias", 5),
    ("regex", 5), ("regex", ""), ("grammar", 5), ("grammar", ""), ("choices", []), ("choices", "yes"),
    ("choices", [1]), ("choices", ["a", ""]), ("choices", 5),
    ("logits_processors", [1]), ("logits_processors", 5), ("ignore_eos", 1), ("thinking", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r}" for name, value in BAD])
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        SamplingParams(**{name: value})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", np.int64(3)), ("temperature", 0), ("temperature", np.float32(0.5)),
        ("top_p", 1), ("top_k", 0), ("min_p", 1), ("presence_penalty", -2), ("frequency_penalty", 2),
        ("repetition_penalty", 0.5), ("repetition_window", 1), ("stop", "END"), ("stop", ()), ("stop", None),
        ("stop_token_ids", (1, 2)), ("seed", 0), ("seed", 2**64 - 1), ("logprobs", 0), ("logprobs", 64),
        ("logit_bias", {5: -100}), ("logit_bias", {}), ("logits_processors", [lambda tokens, logits: logits]),
        ("thinking", False), ("regex", "a+"), ("choices", ("yes", "no")),
    ],
)  # fmt: skip
def test_a_value_in_range_is_taken(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) is not None or value is None


def test_defaults_are_those_of_the_contract() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (
        256,
        0.7,
        0.9,
        0,
        0,
    )
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0, 0, 1)
    assert (params.seed, params.logprobs, params.repetition_window, params.thinking) == (None,) * 4
    assert not params.stop
    assert not params.ignore_eos


def test_max_tokens_goes_by_position() -> None:
    assert SamplingParams(5, 0.1, 0.8).top_p == 0.8


def test_structured_outputs_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="regex and choices"):
        SamplingParams(regex="a", choices=["a"])


def test_what_was_checked_cant_change_later() -> None:
    stop, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("")
    bias[-1] = 0.0
    assert params.stop == ("a",)
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(AttributeError):
        params.max_tokens = -1  # type: ignore[misc]


def test_but_changes_some_fields_and_checks_them() -> None:
    params = SamplingParams(seed=3)
    assert params.but(max_tokens=5) == SamplingParams(seed=3, max_tokens=5)
    with pytest.raises(ValueError, match="max_tokens"):
        params.but(max_tokens=-5)
    with pytest.raises(ValueError, match="unknown sampling parameter 'max_token'"):
        params.but(max_token=5)


@pytest.mark.parametrize("status", RequestStatus)
def test_a_status_is_finished_exactly_if_it_has_a_reason(status: RequestStatus) -> None:
    assert (
        status.is_finished() == (status.get_finish_reason() is not None) == status.name.startswith("FINISHED")
    )


def test_finish_reasons_are_those_of_the_contract() -> None:
    assert RequestStatus.FINISHED_STOPPED.get_finish_reason() == "stop"
    assert RequestStatus.FINISHED_LENGTH_CAPPED.get_finish_reason() == "length"
    assert RequestStatus.FINISHED_ABORTED.get_finish_reason() == "abort"
    assert RequestStatus.FINISHED_ERROR.get_finish_reason() == "error"


def test_usage_adds_up() -> None:
    output = RequestOutput("r", prompt_tokens=3, completion_tokens=4)
    assert output.usage == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
