"""Servers as engines, against a server that does what servers do when things go wrong."""

import base64
import io
import pickle
import queue
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("openai")

from stand_in import VLLM, StandIn, chunk, fails, for_ever, hangs, page, repeats, says, streams

from mlx_nb import (
    AsyncEngineCore,
    EngineCore,
    ModelLoadError,
    RemoteError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from mlx_nb.remote import Key, Remote
from mlx_nb.request import Chat
from mlx_nb.widgets.readings import read

GREEDY = SamplingParams(temperature=0, max_tokens=20)
HELLO = Chat(({"role": "user", "content": "say hello"},))
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def serve() -> Iterator[Callable[..., StandIn]]:
    """Start a stand-in; it ends with the test."""
    servers: list[StandIn] = []

    def start(*answers: Any, **options: Any) -> StandIn:
        servers.append(StandIn(*answers, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def connect() -> Iterator[Callable[..., EngineCore]]:
    """An engine that drives a server; it ends with the test."""
    cores: list[EngineCore] = []

    def start(served: StandIn, **options: Any) -> EngineCore:
        options = {"timeout_s": 5.0, "patience_s": 5.0, **options}
        core = AsyncEngineCore.remote(Remote(served.url, **options)).engine
        cores.append(core)
        core.launch()
        core.wait_ready(10)
        return core

    yield start
    for core in cores:
        core.stop_now(10)


def asked(
    core: EngineCore, prompt: Any = HELLO, params: SamplingParams = GREEDY, **options: Any
) -> RequestOutput:
    """An answer that nobody reads before its end."""
    done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    core.submit(prompt, params, on_done=done.put, **options)
    output = done.get(timeout=20)
    if output.error is not None:
        raise output.error
    return output


def test_an_answer_has_the_servers_text_and_counts(serve, connect) -> None:
    usage = {
        "prompt_tokens": 12,
        "completion_tokens": 3,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    core = connect(serve(says("Hel", "lo", usage=usage)))

    output = core.generate_sync(HELLO, GREEDY)

    assert (output.output_text, output.finish_reason) == ("Hello", "stop")
    assert (output.prompt_tokens, output.completion_tokens, output.cached_tokens) == (12, 3, 8)
    stats = core.get_stats()
    assert (stats["total_prompt_tokens"], stats["total_completion_tokens"]) == (12, 3)


def test_without_counts_of_its_own_the_pieces_are_counted(serve, connect) -> None:
    output = connect(serve(says("a", "b", "c", finish="length"))).generate_sync("raw", GREEDY)

    assert (output.output_text, output.completion_tokens, output.finish_reason) == ("abc", 3, "length")


def test_text_streams_as_it_comes(serve, connect) -> None:
    core = connect(serve(says("one ", "two ", "three", every_s=0.2)))
    request = core.submit(HELLO, GREEDY)

    began = time.monotonic()
    news = [(output.new_text, time.monotonic() - began) for output in core.stream_sync(request)]

    assert "".join(text for text, _ in news) == "one two three"
    assert [text for text, _ in news if text] == ["one ", "two ", "three"]
    assert news[0][1] < news[-1][1] - 0.3


def test_reasoning_and_tool_calls_come_apart(serve, connect) -> None:
    call = {
        "index": 0,
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":'},
    }
    more = {"index": 0, "function": {"arguments": ' "Oslo"}'}}
    core = connect(
        serve(
            streams(
                chunk(reasoning_content="Hm. "),
                chunk(reasoning="Yes."),
                chunk(content="I look."),
                chunk(tool_calls=[call]),
                chunk(tool_calls=[more]),
                chunk("tool_calls"),
            )
        )
    )

    output = core.generate_sync(HELLO, GREEDY, tools=[WEATHER])

    assert (output.reasoning, output.output_text) == ("Hm. Yes.", "I look.")
    assert output.tool_calls == [{"name": "weather", "arguments": {"city": "Oslo"}}]
    assert output.finish_reason == "tool_calls"


def test_a_call_that_is_no_json_stays_in_the_text(serve, connect) -> None:
    call = {"index": 0, "function": {"name": "weather", "arguments": "{oops"}}
    output = connect(serve(streams(chunk(tool_calls=[call]), chunk("tool_calls")))).generate_sync(
        HELLO, GREEDY
    )

    assert (output.output_text, output.tool_calls) == ("weather({oops)", [])


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([chunk(content=[{"type": "text", "text": "he"}, {"type": "text", "text": "y"}])], "hey"),
        ([chunk(content={"no": "text"}), chunk(content=7), chunk(content="hey")], "hey"),
        ([{**chunk(), "choices": [{"index": 1, "delta": {"content": "no"}}]}, chunk(content="hey")], "hey"),
        ([chunk(content="h\ud83d"), chunk(content="\ude00y")], "h\U0001f600y"),
        ([chunk(content="\ude00"), chunk(content="\ud83dé\ud83d")], "\ufffd\ufffdé"),
        ([chunk(tool_calls=[None]), chunk(tool_calls={"a": 1}), chunk(content="hey")], "hey"),
        ([chunk(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": "[1]"}}])], "f([1])"),
    ],
)
def test_whatever_comes_in_the_place_of_a_text_the_answer_is_one(
    serve, connect, chunks: list[Any], text: str
) -> None:
    output = connect(serve(streams(*chunks, chunk("stop")))).generate_sync(HELLO, GREEDY)

    assert (output.output_text, output.tool_calls, output.finish_reason) == (text, [], "stop")


@pytest.mark.parametrize("count", [-3, True, 10**30, "many"])
def test_counts_that_are_none_are_passed_over(serve, connect, count: Any) -> None:
    core = connect(serve(says("a", "b", usage={"prompt_tokens": count, "completion_tokens": count})))

    output = core.generate_sync(HELLO, GREEDY)

    assert (output.prompt_tokens, output.completion_tokens) == (0, 2)
    assert output.prompt_tokens is not False


def test_a_stop_string_ends_the_answer_even_if_the_server_passes_over_it(serve, connect) -> None:
    server = serve(for_ever)
    output = connect(server).generate_sync(HELLO, GREEDY.but(stop="n ag"))

    assert (output.output_text, output.finish_reason) == ("agai", "stop")
    assert server.asked[0]["stop"] == ["n ag"]


def test_a_request_says_what_was_asked_and_nothing_else(serve, connect) -> None:
    server = serve(says("ok"))
    core = connect(server)
    core.generate_sync(HELLO, SamplingParams(max_tokens=7, temperature=0.5, top_p=0.8))
    core.generate_sync("Once", GREEDY.but(seed=3))

    chat, raw = server.asked
    about = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    said = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.8}
    assert chat == {**about, **said, "messages": [{"role": "user", "content": "say hello"}]}
    assert raw == {**about, "max_tokens": 20, "temperature": 0, "top_p": 0.9, "seed": 3, "prompt": "Once"}


ASKED: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("vllm", {"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
    ("vllm", {"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ("vllm", {"stop_token_ids": [7], "ignore_eos": True}, {"stop_token_ids": [7], "ignore_eos": True}),
    (
        "vllm",
        {"choices": ["a", "b"]},
        {"structured_outputs": {"choice": ["a", "b"]}, "guided_choice": ["a", "b"]},
    ),
    ("vllm", {"thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
    ("vllm", {"repetition_window": 9}, None),
    ("vllm", {"logprobs": 1}, None),
    ("vllm", {"logits_processors": [lambda tokens, logits: logits]}, None),
    ("vllm-mlx", {"thinking": True}, {"enable_thinking": True}),
    ("vllm-mlx", {"seed": 1}, None),
    ("vllm-mlx", {"regex": "a+"}, None),
    ("mlx-lm", {"repetition_penalty": 1.2}, {"repetition_penalty": 1.2, "repetition_context_size": 2**30}),
    ("mlx-lm", {"repetition_penalty": 1.2, "repetition_window": 9}, {"repetition_context_size": 9}),
    ("mlx-lm", {"logit_bias": {4: 1.5}}, {"logit_bias": {"4": 1.5}}),
    ("mlx-lm", {"schema": {"type": "object"}}, None),
    ("mlx-lm", {"ignore_eos": True}, None),
    ("openai", {"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    ("openai", {"top_k": 3}, None),
    ("openai", {"min_p": 0.1}, None),
    ("openai", {"stop": ["a", "b", "c", "d", "e"]}, None),
]


@pytest.mark.parametrize(("kind", "params", "sent"), ASKED)
def test_what_a_kind_of_server_has_not_is_refused_and_what_it_has_is_passed_on(
    serve, connect, kind: str, params: dict[str, Any], sent: dict[str, Any] | None
) -> None:
    server = serve(says("ok"))
    core = connect(server, server=kind)
    if sent is None:
        with pytest.raises(RequestError, match=r"leave|give fewer") as refused:
            core.submit(HELLO, GREEDY.but(**params))
        assert "\n" not in str(refused.value)
        assert server.asked == []
    else:
        core.generate_sync(HELLO, GREEDY.but(**params))
        assert server.asked[0].items() >= sent.items()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("vllm", {"thinking": True}),
        ("vllm-mlx", {"schema": {"type": "object"}}),
        ("openai", {"schema": {"type": "object"}}),
    ],
)
def test_what_a_raw_prompt_can_not_have_is_refused(
    serve, connect, kind: str, options: dict[str, Any]
) -> None:
    server = serve()
    core = connect(server, server=kind)

    with pytest.raises(RequestError, match="not with a raw prompt"):
        core.submit("Once upon a time", GREEDY.but(**options))
    with pytest.raises(RequestError, match="leave them out, or raw"):
        core.submit("Once upon a time", GREEDY, tools=[WEATHER])
    assert server.asked == []


@pytest.mark.parametrize("kind", ["openai", "vllm", "vllm-mlx"])
def test_a_schema_is_a_response_format(serve, connect, kind: str) -> None:
    server, schema = serve(says('{"a": 1}')), {"type": "object"}
    connect(server, server=kind).generate_sync(HELLO, GREEDY.but(schema=schema))

    assert server.asked[0]["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    ("models", "kind"),
    [
        ([VLLM], "vllm"),
        ([{"id": "tiny", "owned_by": "vllm-mlx"}], "vllm-mlx"),
        ([{"id": "tiny", "object": "model", "created": 1}], "mlx-lm"),
        ([{"id": "tiny", "owned_by": "me"}], "openai"),
    ],
)
def test_what_a_server_is_shows_in_the_models_it_lists(serve, connect, models: list[Any], kind: str) -> None:
    core = connect(serve(models=models))

    assert core.get_stats()["remote"]["server"] == kind
    assert core.info.backend.endswith(f"({kind})")


def test_token_ids_and_what_needs_a_tokenizer_are_refused(serve, connect) -> None:
    core = connect(serve())

    with pytest.raises(RequestError, match="not token ids"):
        core.submit([1, 2, 3], GREEDY)
    with pytest.raises(RequestError, match="tokenizer is the server's"):
        core.codec.encode("text")


def test_calls_in_a_conversation_are_sent_as_the_api_has_them(serve, connect) -> None:
    server = serve(says("ok"))
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = ({"role": "assistant", "content": "", "tool_calls": [call]},)
    connect(server).generate_sync(Chat(messages), GREEDY)

    assert server.asked[0]["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


def test_pictures_are_sent_in_their_places(serve, connect) -> None:
    image = pytest.importorskip("PIL.Image")
    server = serve(says("red and blue"))
    core = connect(server)
    parts = [{"type": "image"}, {"type": "text", "text": "or"}, {"type": "image"}]
    chat = Chat(({"role": "user", "content": parts},))
    core.generate_sync(
        chat, GREEDY, images=[image.new("RGB", (3, 2), "red"), image.new("RGB", (5, 4), "blue")]
    )

    (message,) = server.asked[0]["messages"]
    first, text, second = message["content"]
    assert text == {"type": "text", "text": "or"}
    sizes = []
    for part in (first, second):
        head, _, data = part["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        sizes.append(image.open(io.BytesIO(base64.b64decode(data))).size)
    assert sizes == [(3, 2), (5, 4)]
    with pytest.raises(RequestError, match="places for 2 images, and 0 were given"):
        core.submit(chat, GREEDY)
    with pytest.raises(RequestError, match="takes no videos"):
        core.submit(chat, GREEDY, videos=["clip.mp4"])


# -- the model, and the way to it ----------------------------------------------------------------------------------


def test_a_model_that_is_not_there_names_those_that_are(serve, connect) -> None:
    models = [{"id": name, "owned_by": "vllm"} for name in ("small", "large")]

    with pytest.raises(ModelLoadError, match="has no model 'huge': it has small, large"):
        connect(serve(models=models), model="huge")
    with pytest.raises(ModelLoadError, match="has 2 models: choose one with --model: small, large"):
        connect(serve(models=models))
    assert connect(serve(models=models), model="large").info.name == "large"


def test_the_context_is_the_servers(serve, connect) -> None:
    assert connect(serve()).info.context_length == 512


def test_a_server_that_is_not_there_is_one_line(serve, connect) -> None:
    server = serve()
    server.stop()

    with pytest.raises(RemoteError, match=r"can't be reached .*is the server running") as error:
        connect(server)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:secret@host",
        "host:8000",
        "ftp://host",
        "http://host/v1?key=secret",
        "http://",
        "http://host:x",
        "http://host name:80",
    ],
)
def test_urls_that_are_none_are_refused_without_showing_them(url: str) -> None:
    with pytest.raises(ValueError, match="URL") as refused:
        Remote(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "used"),
    [
        ("http://host:80/", "http://host:80/v1"),
        ("https://host/api/v3/", "https://host/api/v3"),
        ("http://[::1]:8080", "http://[::1]:8080/v1"),
    ],
)
def test_a_url_without_a_path_means_the_usual_one(url: str, used: str) -> None:
    assert Remote(url).url == used


def test_without_the_package_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)

    with pytest.raises(RemoteError, match=re.escape("pip install 'mlx-nb[remote]'")):
        AsyncEngineCore.remote(Remote("http://localhost:1"))


# -- keys ----------------------------------------------------------------------------------------------------------


def test_a_key_is_sent_and_shown_nowhere(serve, connect) -> None:
    key = Key("sk-very-secret", "MY_KEY")
    server = serve(says("hello"), key="sk-very-secret")
    core = connect(server, key=key)
    core.generate_sync(HELLO, GREEDY)

    assert server.keys == ["Bearer sk-very-secret"] * 2
    remote = Remote(server.url, key=key)
    assert "secret" not in f"{remote!r} {key!r} {key} {core.info} {core.get_stats()}"
    with pytest.raises(TypeError, match="never written down"):
        pickle.dumps(remote)


def test_a_key_that_is_cut_off_at_the_end_of_a_line_is_hidden_too(serve, connect) -> None:
    server = serve(fails(400, "x" * 290 + " sk-very-secret"))

    with pytest.raises(RequestError) as refused:
        connect(server, key=Key("sk-very-secret", "MY_KEY")).generate_sync(HELLO, GREEDY)
    assert "sk-" not in str(refused.value)


def test_an_organization_goes_with_its_key_only(serve, connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "org-mine")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-mine")
    server = serve()
    seen: list[str | None] = []
    listed = server._list
    monkeypatch.setattr(
        server, "_list", lambda got: (seen.append(got.headers.get("OpenAI-Organization")), listed(got))
    )

    connect(server)
    connect(server, key=Key("other", "MY_KEY"))
    connect(server, key=Key("usual", "OPENAI_API_KEY"))

    assert seen == [None, None, "org-mine"]


def test_a_wrong_key_is_one_line_without_the_key(serve, connect) -> None:
    server = serve(key="right")

    with pytest.raises(
        RemoteError, match=r"refuses the key from MY_KEY .*wrong key: Bearer \*\*\*"
    ) as refused:
        connect(server, key=Key("sk-wrong", "MY_KEY"))
    error: BaseException | None = refused.value
    while error is not None:
        assert "sk-wrong" not in f"{error} {error!r} {vars(error)}"
        error = error.__cause__ or error.__context__


def test_a_server_that_wants_a_key_says_how_to_give_one(serve, connect) -> None:
    with pytest.raises(RemoteError, match=r"asks for a key .*OPENAI_API_KEY.*--key-env.*--ask-key"):
        connect(serve(key="right"))


# -- when things go wrong ------------------------------------------------------------------------------------------


def test_a_busy_server_is_asked_again_when_it_says(serve, connect) -> None:
    server = serve(fails(429, "slow down", Retry_After="1"), says("hello"))
    core = connect(server)

    began = time.monotonic()
    output = core.generate_sync(HELLO, GREEDY)

    assert output.output_text == "hello"
    assert 1 <= time.monotonic() - began < 4
    assert core.get_stats()["remote"]["retries"] == 1


def test_a_wait_beyond_patience_is_not_begun(serve, connect) -> None:
    core = connect(serve(fails(429, "slow down", Retry_After="600")))

    began = time.monotonic()
    with pytest.raises(RemoteError, match=r"is asked too much \(429\): slow down"):
        core.generate_sync(HELLO, GREEDY)
    assert time.monotonic() - began < 3


def test_a_server_that_fails_for_a_moment_is_asked_again(serve, connect) -> None:
    server = serve(fails(500), fails(503), says("hello"))

    assert connect(server).generate_sync(HELLO, GREEDY).output_text == "hello"
    assert len(server.asked) == 3


def test_patience_ends(serve, connect) -> None:
    core = connect(serve(fails(503, "loading")), patience_s=1.5)

    began = time.monotonic()
    with pytest.raises(RemoteError, match=r"fails \(503\): loading"):
        core.generate_sync(HELLO, GREEDY)
    assert time.monotonic() - began < 4


def test_a_request_that_a_server_always_fails_at_is_given_up_soon(serve, connect) -> None:
    server = serve(fails(500, "internal error"))

    with pytest.raises(RemoteError, match=r"fails \(500\): internal error"):
        connect(server, patience_s=600.0).generate_sync(HELLO, GREEDY)
    assert len(server.asked) == 4


def test_a_request_that_is_refused_is_not_asked_again(serve, connect) -> None:
    server = serve(fails(400, "the context is 512 tokens"))

    with pytest.raises(RequestError, match=r"refuses the request \(400\): the context is 512 tokens"):
        connect(server).generate_sync(HELLO, GREEDY)
    assert len(server.asked) == 1


def test_while_requests_wait_the_engine_says_for_what(serve, connect) -> None:
    core = connect(serve(fails(503, "loading")))
    request = core.submit(HELLO, GREEDY)

    end = time.monotonic() + 5
    while core.get_stats()["remote"]["problem"] is None:
        assert time.monotonic() < end
        time.sleep(0.02)

    assert "loading" in core.get_stats()["remote"]["problem"]
    assert "loading" in str(read(core)["engine"]["notice"])
    core.abort(request)


def test_a_server_that_is_restarted_is_waited_for(serve, connect) -> None:
    server = serve(says("hello"))
    core = connect(server, patience_s=20.0)
    server.stop()
    request = core.submit(HELLO, GREEDY)
    time.sleep(0.6)
    server.start()

    assert [*core.stream_sync(request)][-1].output_text == "hello"


def test_an_answer_cut_before_its_first_text_is_asked_again(serve, connect) -> None:
    server = serve(says(finish=None), says("hello"))

    assert connect(server).generate_sync(HELLO, GREEDY).output_text == "hello"


def test_of_an_answer_cut_while_it_is_read_nothing_is_doubled(serve, connect) -> None:
    server = serve(says("hel", finish=None, every_s=0.3), says("hello"))
    core = connect(server)
    request = core.submit(HELLO, GREEDY)

    read: list[str] = []
    with pytest.raises(RemoteError, match=r"was lost in the middle of an answer: .*ask again"):
        read.extend(output.new_text for output in core.stream_sync(request))
    assert "".join(read) == "hel"
    assert len(server.asked) == 1


def test_an_answer_that_nobody_reads_before_its_end_begins_again(serve, connect) -> None:
    server = serve(says("hel", "l", finish=None), says("hel", "lo"))
    core = connect(server)

    output = asked(core)

    assert (output.output_text, output.completion_tokens) == ("hello", 2)
    assert core.get_stats()["total_completion_tokens"] == 2


def test_a_stream_that_ends_without_an_end_is_a_cut(serve, connect) -> None:
    server = serve(streams(chunk(content="hel")), says("hello"))

    assert asked(connect(server)).output_text == "hello"


def test_what_breaks_after_the_end_breaks_nothing(serve, connect) -> None:
    server = serve(streams(chunk(content="hello"), chunk("stop"), "{no json"))

    assert connect(server).generate_sync(HELLO, GREEDY).output_text == "hello"


def test_a_server_that_hangs_is_given_up(serve, connect) -> None:
    core = connect(serve(hangs(3)), timeout_s=0.4, patience_s=0.0)

    with pytest.raises(RemoteError, match="no sign of life"):
        core.generate_sync(HELLO, GREEDY)


def test_a_request_has_its_own_time(serve, connect) -> None:
    core = connect(serve(hangs(3)))

    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.3 s"):
        core.generate_sync(HELLO, GREEDY, timeout=0.3)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "answer",
    [page, streams("{no json"), streams({"error": {"message": "out of memory"}}), streams(chunk("odd"))],
)
def test_answers_that_are_none_are_one_line(serve, connect, answer: Any) -> None:
    server = serve(answer)

    with pytest.raises(RemoteError, match=r"right URL|out of memory|odd") as error:
        connect(server).generate_sync(HELLO, GREEDY)
    assert "\n" not in str(error.value)
    assert len(server.asked) == 1


def test_an_abort_closes_the_stream(serve, connect) -> None:
    server = serve(for_ever)
    core = connect(server)
    request = core.submit(HELLO, GREEDY.but(max_tokens=10**6))
    stream = core.stream_sync(request)
    next(stream)
    core.abort(request)

    assert [*stream][-1].finish_reason == "abort"
    end = time.monotonic() + 5
    while not server.left:
        assert time.monotonic() < end, "the server still writes"
        time.sleep(0.01)
    assert core.get_stats()["num_running"] == 0


def test_an_id_may_be_used_again_after_an_abort(serve, connect) -> None:
    core = connect(serve(for_ever, says("new")))
    core.submit(HELLO, GREEDY, "mine")
    next(core.stream_sync("mine"))
    core.abort("mine")

    assert core.generate_sync(HELLO, GREEDY, "mine").output_text == "new"


def test_stopping_ends_what_is_with_the_server(serve, connect) -> None:
    server = serve(for_ever)
    core = connect(server)
    core.submit(HELLO, GREEDY)
    time.sleep(0.2)

    began = time.monotonic()
    core.stop_now(10)

    assert time.monotonic() - began < 2
    assert core.state == "stopped"


def test_no_more_requests_are_with_the_server_than_it_may_have(serve, connect) -> None:
    server = serve(says("ok", every_s=0.1))
    core = connect(server, concurrency=3)

    outputs = core.generate_batch_sync([HELLO] * 10, GREEDY)

    assert [output.output_text for output in outputs] == ["ok"] * 10
    assert server.most == 3


def test_one_bad_row_is_not_the_others(serve, connect) -> None:
    server = serve(repeats, fails(400, "bad"), repeats)
    core = connect(server, concurrency=1)

    outputs = core.generate_batch_sync([HELLO] * 3, GREEDY, errors="return")

    assert [output.output_text for output in outputs] == ["hello", "", "hello"]
    assert [output.error is None for output in outputs] == [True, False, True]
