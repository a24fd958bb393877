"""Starting, asking and chatting from Python."""

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from models import tiny, tiny_folder
from scripts import says, until, wait_until

import mlx_nb
from mlx_nb import (
    AsyncEngineCore,
    Conversation,
    EngineCore,
    EngineNotStarted,
    MlxNbError,
    RequestError,
    SamplingParams,
    UnknownModelError,
)
from mlx_nb.backends.fake import text_tokens
from mlx_nb.session.session import default_session


def prompts_seen(adopt: Any, **options: Any) -> list[str]:
    """Start an engine; the list it returns gets every prompt."""
    seen: list[str] = []

    def script(request: Any) -> list[int]:
        seen.append(bytes(request.prompt_token_ids).decode())
        return text_tokens(f"answer {len(seen)}")

    adopt(script, **options)
    return seen


def test_generate_answers_through_the_chat_template(adopt: Any) -> None:
    seen = prompts_seen(adopt)

    answer = mlx_nb.generate("Hello", system="Be brief")

    assert (answer.text, answer.finish_reason, str(answer)) == ("answer 1", "stop", "answer 1")
    assert answer.tokens == text_tokens("answer 1")
    assert answer.prompt_tokens == len(seen[0])
    assert answer.timings["total_s"] >= answer.timings["ttft_s"] >= 0
    mlx_nb.generate("Hello", raw=True)
    mlx_nb.generate([{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}])
    assert seen == [
        "system: Be brief\nuser: Hello\nassistant: ",
        "Hello",
        "system: Be kind\nuser: Hi\nassistant: ",
    ]


def test_sampling_comes_as_parameters_or_as_keywords(adopt: Any) -> None:
    adopt()
    params = SamplingParams(max_tokens=5, logprobs=0)

    assert mlx_nb.generate("abc", params, raw=True).text == "abcab"
    answer = mlx_nb.generate("abc", params, raw=True, max_tokens=2)
    assert (answer.text, len(answer.logprobs or [])) == ("ab", 2)


async def test_agenerate_gives_what_generate_gives(adopt: Any) -> None:
    adopt()

    awaited = await mlx_nb.agenerate("abc", max_tokens=7, raw=True)

    blocking = mlx_nb.generate("abc", max_tokens=7, raw=True)
    assert (awaited.text, awaited.tokens, awaited.finish_reason) == ("abcabca", blocking.tokens, "length")


async def test_several_answers_come_as_a_list_with_seeds_that_count_up(adopt: Any) -> None:
    seeds: list[int] = []

    def script(request: Any) -> list[int]:
        seeds.append(request.seed)
        return text_tokens(str(request.seed))

    adopt(script)

    answers = mlx_nb.generate("abc", n=3, seed=7)
    awaited = await mlx_nb.agenerate("abc", n=3, seed=7)

    assert [answer.text for answer in answers] == [answer.text for answer in awaited] == ["7", "8", "9"]
    assert sorted(seeds) == [7, 7, 8, 8, 9, 9]
    assert len(mlx_nb.generate("abc", n=1)) == 1


def test_the_engine_is_the_current_one_a_named_one_or_the_one_that_is_given(adopt: Any) -> None:
    core = adopt(says("one"), name="one")
    adopt(says("two"), name="two")

    assert mlx_nb.generate("abc").text == "two"
    for engine in ("one", core, AsyncEngineCore.over(core)):
        assert mlx_nb.generate("abc", engine=engine).text == "one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((" ",), "the prompt is empty: give it a text"),
        ((["a", "b"],), "a prompt is a text, or messages such as"),
        (([],), "a prompt is a text, or messages such as"),
        ((3,), "a prompt is a text, or messages such as"),
        (("a", SamplingParams(), {"raw": True, "system": "b"}), "act through the chat template"),
        (("a", SamplingParams(thinking=True), {"raw": True}), "act through the chat template"),
        (([{"role": "user", "content": "a"}], None, {"system": "b"}), "raw and system go with a text"),
        (("a", None, {"temprature": 1}), "unknown sampling parameter 'temprature'"),
        (("a", None, {"max_tokens": -1}), "max_tokens must be at least 0, got -1"),
        (("a", None, {"n": 0}), "n is a number of answers, 1 or more, got 0"),
        (("a" * 5000,), "the model's context ends at 4,096: shorten it"),
    ],
)
async def test_what_can_not_be_asked_is_refused_and_nothing_is_queued(
    adopt: Any, arguments: Any, message: str
) -> None:
    engine = adopt()
    prompt, params, options = (*arguments, None, None)[0], *(*arguments, None, {})[1:3]
    options = options or {}

    with pytest.raises(ValueError, match=message):
        mlx_nb.generate(prompt, params, **options)
    with pytest.raises(ValueError, match=message):
        await mlx_nb.agenerate(prompt, params, **options)

    assert engine.get_stats()["num_requests_processed"] == 0


async def test_without_an_engine_each_says_what_to_call() -> None:
    hint = r"no engine is running: start one with mlx_nb.start\(\"demo\"\)"
    for call in (mlx_nb.generate, mlx_nb.chat, mlx_nb.count_tokens):
        with pytest.raises(EngineNotStarted, match=hint):
            call("hi")
    for awaited in (mlx_nb.agenerate, mlx_nb.achat):
        with pytest.raises(EngineNotStarted, match=hint):
            await awaited("hi")
    with pytest.raises(EngineNotStarted, match=hint):
        mlx_nb.stop()


async def test_a_fault_of_one_answer_ends_the_others_and_is_raised(adopt: Any) -> None:
    def script(request: Any) -> Any:
        if request.seed == 8:
            raise RuntimeError("the model broke")
        while True:
            yield ord("x")

    engine = adopt(script, step_s=0.001)

    with pytest.raises(RuntimeError, match="the model broke"):
        mlx_nb.generate("abc", n=3, seed=7, max_tokens=100_000)
    wait_until(lambda: engine.get_stats()["active_requests"] == 0)
    with pytest.raises(RuntimeError, match="the model broke"):
        await mlx_nb.agenerate("abc", n=3, seed=7, max_tokens=100_000)
    await until(lambda: engine.get_stats()["active_requests"] == 0)


def test_a_timeout_is_raised(adopt: Any) -> None:
    engine = adopt(step_s=0.01)

    with pytest.raises(TimeoutError):
        mlx_nb.generate("abc", max_tokens=100_000, timeout=0.2)

    assert engine.get_stats()["active_requests"] == 0


async def test_cancelling_ends_the_request(adopt: Any) -> None:
    engine = adopt(step_s=0.001)
    asking = asyncio.create_task(mlx_nb.agenerate("abc", max_tokens=100_000, n=2))
    await until(lambda: engine.get_stats()["num_running"] == 2)

    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: engine.get_stats()["active_requests"] == 0)


async def test_a_blocking_call_on_a_running_loop_works(adopt: Any) -> None:
    adopt()

    assert mlx_nb.generate("abc", max_tokens=3, raw=True).text == "abc"


def test_tokens_are_counted_as_the_model_reads_them(adopt: Any) -> None:
    prompts_seen(adopt)

    assert mlx_nb.count_tokens("Hello", raw=True) == 5
    for prompt, options in [("Hello", {}), ("Hello", {"system": "Be brief"})]:
        assert mlx_nb.count_tokens(prompt, **options) == mlx_nb.generate(prompt, **options).prompt_tokens
    messages = [{"role": "user", "content": "Hello"}]
    assert mlx_nb.count_tokens(messages) == mlx_nb.count_tokens("Hello")


def test_functions_and_schemas_are_tools_and_calls_come_back(adopt: Any) -> None:
    offered: list[Any] = []

    def script(request: Any) -> list[int]:
        offered.append(request.tools)
        return text_tokens('<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>')

    def weather(city: str) -> str:
        """Say how the weather is."""
        raise AssertionError("nothing is called")

    adopt(script)

    answer = mlx_nb.generate("How is it in Paris?", tools=[weather])
    mlx_nb.generate("How is it in Paris?", tools=offered[0])

    assert answer.tool_calls == [{"name": "weather", "arguments": {"city": "Paris"}}]
    assert offered[0] == offered[1]
    assert offered[0][0]["function"]["description"] == "Say how the weather is."
    with pytest.raises(ValueError, match="is no function"):
        mlx_nb.generate("How is it?", tools=[3])  # type: ignore[list-item]


def test_chat_remembers(adopt: Any) -> None:
    seen = prompts_seen(adopt)
    talk = Conversation("Be brief")

    mlx_nb.chat("One", talk)
    mlx_nb.chat("Two", talk)

    assert seen[1] == "system: Be brief\nuser: One\nassistant: answer 1\nuser: Two\nassistant: "
    assert [turn.answer for turn in talk.turns] == ["answer 1", "answer 2"]


def test_what_is_no_conversation_is_refused(adopt: Any) -> None:
    adopt()

    with pytest.raises(RequestError, match="a conversation is a name or a Conversation, got 5"):
        mlx_nb.chat("hi", 5)  # type: ignore[arg-type]


async def test_chats_of_one_name_are_one_and_of_two_names_are_two(adopt: Any) -> None:
    seen = prompts_seen(adopt)

    mlx_nb.chat("One", "first of two")
    await mlx_nb.achat("Two", "first of two", system="Be kind")
    mlx_nb.chat("Three", "second of two")

    assert seen[1] == "system: Be kind\nuser: One\nassistant: answer 1\nuser: Two\nassistant: "
    assert seen[2] == "user: Three\nassistant: "
    assert len(mlx_nb.conversation("first of two").turns) == 2


async def test_the_result_of_a_chat_says_how_many_turns_were_left_out(adopt: Any) -> None:
    prompts_seen(adopt, context_length=200)
    talk = Conversation()

    left_out = [mlx_nb.chat(f"{i} " * 20, talk, max_tokens=20).turns_left_out for i in range(5)]
    left_out.append((await mlx_nb.achat("more", talk, max_tokens=20)).turns_left_out)

    assert left_out[:2] == [0, 0]
    assert left_out == sorted(left_out)
    assert left_out[-1] >= 2
    assert len(talk.turns) == 6


async def test_a_chat_that_fails_or_is_cancelled_leaves_the_conversation_as_it_was(adopt: Any) -> None:
    engine = adopt(step_s=0.001)
    talk = Conversation()

    with pytest.raises(TimeoutError):
        mlx_nb.chat("abc", talk, max_tokens=100_000, timeout=0.1)
    asking = asyncio.create_task(mlx_nb.achat("abc", talk, max_tokens=100_000))
    await until(lambda: engine.get_stats()["num_running"] == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    for question in (" ", [{"role": "user", "content": "abc"}]):
        with pytest.raises(RequestError, match="a question is a text that isn't empty"):
            mlx_nb.chat(question, talk)  # type: ignore[arg-type]

    assert talk.turns == ()


def test_threads_may_ask_side_by_side(adopt: Any) -> None:
    adopt(step_s=0.001)
    texts: dict[str, str] = {}

    def ask(letter: str) -> None:
        texts[letter] = mlx_nb.generate(letter, raw=True, max_tokens=20).text

    threads = [threading.Thread(target=ask, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert texts == {letter: letter * 20 for letter in "abcd"}


# -- with a real, tiny model ------------------------------------------------------------------------------


@pytest.fixture
def started() -> Any:
    """An engine with a tiny model, started as a script does."""
    yield mlx_nb.start(tiny_folder())
    default_session().stop_all(10)


def test_start_gives_an_engine_that_is_ready_and_stop_frees_it(started: AsyncEngineCore) -> None:
    assert mlx_nb.current_engine() is started
    assert started.engine.state == "running"
    assert mlx_nb.start(tiny_folder()) is started, "it runs already"
    answer = mlx_nb.generate("Hello", max_tokens=4, temperature=0)
    assert answer.completion_tokens == 4

    mlx_nb.stop()

    assert started.engine.state == "closed"
    with pytest.raises(EngineNotStarted):
        mlx_nb.generate("Hello")


def test_options_of_start_are_fields_of_the_configurations() -> None:
    try:
        engine = mlx_nb.start(tiny_folder(), name="small", max_num_seqs=3, stream_interval=2)
        assert engine.engine.config.scheduler_config.max_num_seqs == 3
        assert engine.engine.config.stream_interval == 2
        assert mlx_nb.generate("Hello", engine="small", max_tokens=2).completion_tokens == 2
    finally:
        default_session().stop_all(10)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"max_num_sqs": 3},
            RequestError,
            "unknown option 'max_num_sqs' of an engine: did you mean max_num_seqs?",
        ),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs"),
        ({"model": "no/such/model/at/all"}, UnknownModelError, "no/such/model/at/all"),
    ],
)
def test_a_start_that_fails_leaves_nothing_behind(
    started: AsyncEngineCore, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message.replace("?", r"\?")):
        mlx_nb.start(**{"model": tiny_folder(), "name": "other", **options})

    assert list(default_session().engines) == ["default"]
    assert mlx_nb.current_engine() is started


def test_a_model_that_does_not_load_leaves_nothing_behind(started: AsyncEngineCore, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(MlxNbError):
        mlx_nb.start(tmp_path, name="broken")

    assert list(default_session().engines) == ["default"]
    assert mlx_nb.current_engine() is started


def test_what_a_model_can_not_do_is_refused(started: AsyncEngineCore) -> None:
    with pytest.raises(RequestError, match="this model can't call tools: leave tools out"):
        mlx_nb.generate("Hello", tools=[len])
    with pytest.raises(RequestError, match="this model doesn't think before it answers: leave thinking out"):
        mlx_nb.chat("Hello", Conversation(), thinking=True)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3", "mamba2"])
def test_later_turns_reuse_the_prefix_cache(family: str) -> None:
    core = EngineCore(*tiny(family))
    core.launch()
    talk = Conversation("You know a lot about numbers and words.")
    try:
        first = mlx_nb.chat("Count to ten.", talk, engine=core, max_tokens=12, temperature=0)
        second = mlx_nb.chat("And back again.", talk, engine=core, max_tokens=12, temperature=0)
        third = mlx_nb.chat("Once more.", talk, engine=core, max_tokens=12, temperature=0)
    finally:
        core.close()

    assert first.cached_tokens == 0
    assert 0 < second.cached_tokens < second.prompt_tokens
    assert second.cached_tokens < third.cached_tokens < third.prompt_tokens


SCRIPT = """
import sys
import mlx_nb

mlx_nb.start(sys.argv[1])
print(mlx_nb.generate("Hello", max_tokens=3, temperature=0).completion_tokens)
print(mlx_nb.chat("Hello", max_tokens=3, temperature=0).finish_reason, mlx_nb.count_tokens("Hello") > 5)
"""


@pytest.mark.slow
def test_a_script_that_forgets_to_stop_ends_cleanly() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_folder())], capture_output=True, text=True, check=False
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["3", "length", "True"]


def test_importing_the_api_loads_no_model_library() -> None:
    code = "import sys, mlx_nb; mlx_nb.generate; print('mlx' in sys.modules, 'mlx_lm' in sys.modules)"
    began = time.monotonic()

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.split() == ["False", "False"]
    assert time.monotonic() - began < 20


def test_the_engine_in_use_goes_by_the_name_of_its_package(adopt: Any) -> None:
    core = adopt(name="one")
    adopt(name="two")
    assert mlx_nb.engine("one").engine is core
    assert mlx_nb.engine().engine is mlx_nb.current_engine("two").engine
    from mlx_nb.engine.core import EngineCore as Imported

    assert isinstance(core, Imported)
