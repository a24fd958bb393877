"""Engines that are servers, by name: connecting, keys, questions and rows of frames."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("openai")

from stand_in import StandIn, fails, repeats, says

import mlx_nb
from mlx_nb import MlxNbError, RemoteError, RequestError
from mlx_nb.session.keys import find_key
from mlx_nb.session.session import default_session

Serve = Callable[..., StandIn]
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FRAME = pd.DataFrame({"text": ["one", "two", "three", "two"]})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Start a stand-in; it and all engines end with the test."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    servers: list[StandIn] = []

    def start(*answers: Any, **options: Any) -> StandIn:
        servers.append(StandIn(*answers, **options))
        return servers[-1]

    yield start
    default_session().stop_all(10)
    for server in servers:
        server.stop()


def answering(text: str) -> Any:
    """Every prompt with this text."""
    return says(text, usage={"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})


def test_a_server_is_the_current_engine_once_it_is_connected(serve: Serve) -> None:
    handle = mlx_nb.connect(serve(answering("hello")).url)

    assert mlx_nb.current_engine() is handle
    output = mlx_nb.generate("Say hello", system="Be kind.", max_tokens=4)
    assert (str(output), output.prompt_tokens, output.completion_tokens, output.finish_reason) == (
        "hello", 3, 2, "stop",
    )  # fmt: skip


def test_what_does_not_connect_leaves_no_engine(serve: Serve) -> None:
    before = mlx_nb.connect(serve().url)

    with pytest.raises(RemoteError, match="asks for a key"):
        mlx_nb.connect(serve(key="right").url, name="other")
    with pytest.raises(ValueError, match="URL"):
        mlx_nb.connect("http://me:secret@localhost")
    assert list(default_session().engines) == ["default"]
    assert mlx_nb.current_engine() is before


def test_connecting_again_gives_the_same_engine_and_another_server_wants_another_name(serve: Serve) -> None:
    server = serve()
    handle = mlx_nb.connect(server.url)

    assert mlx_nb.connect(f"{server.url}/v1/") is handle
    with pytest.raises(MlxNbError, match=r"stop it first .*or choose another --name"):
        mlx_nb.connect(serve().url)
    assert mlx_nb.connect(serve().url, name="second") is not handle


def test_a_stopped_engine_says_how_to_have_it_back(serve: Serve) -> None:
    server = serve()
    mlx_nb.connect(server.url)
    engine = default_session().find()
    engine.core.close()

    with pytest.raises(mlx_nb.EngineNotStarted, match=f"%mlx_engine connect {server.url}/v1"):
        mlx_nb.generate("Hello")


def test_a_conversation_is_sent_whole_each_time(serve: Serve) -> None:
    server = serve(answering("one"), answering("two"))
    mlx_nb.connect(server.url)
    talk = mlx_nb.Conversation("Be brief.")
    mlx_nb.chat("First?", talk)
    mlx_nb.chat("Second?", talk)

    assert [(message["role"], message["content"]) for message in server.asked[1]["messages"]] == [
        ("system", "Be brief."),
        ("user", "First?"),
        ("assistant", "one"),
        ("user", "Second?"),
    ]


def test_tools_are_offered_and_calls_come_back(serve: Serve) -> None:
    def weather(city: str) -> str:
        """Look it up."""
        return city

    server = serve(answering("none"))
    mlx_nb.connect(server.url)
    mlx_nb.generate("Is it raining?", tools=[weather])

    (tool,) = server.asked[0]["tools"]
    assert tool["function"]["name"] == "weather"


async def test_an_answer_can_be_awaited(serve: Serve) -> None:
    mlx_nb.connect(serve(answering("hello")).url)

    assert (await mlx_nb.agenerate("Say hello", max_tokens=4)).text == "hello"


@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (lambda: mlx_nb.count_tokens("How long?"), "tokenizer is the server's"),
        (lambda: mlx_nb.generate("Look", videos=[["x.png"]]), "takes text and images only|x.png"),
        (lambda: mlx_nb.score_frame(FRAME, "{{ text }}", ["a"]), "how likely"),
        (lambda: mlx_nb.generate("Hello", logprobs=1), "leave logprobs out"),
    ],
)
def test_what_a_server_can_not_do_is_one_line(serve: Serve, ask: Callable[[], Any], line: str) -> None:
    server = serve()
    mlx_nb.connect(server.url)

    with pytest.raises((RequestError, OSError), match=line) as refused:
        ask()
    assert "\n" not in str(refused.value)
    assert server.asked == []


def test_a_turn_with_a_picture_keeps_it(serve: Serve) -> None:
    image = pytest.importorskip("PIL.Image")
    server = serve(answering("red"))
    mlx_nb.connect(server.url)
    talk = mlx_nb.Conversation()
    mlx_nb.chat("Which colour?", talk, images=image.new("RGB", (2, 2), "red"))
    mlx_nb.chat("Are you sure?", talk)

    for body in server.asked:
        assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "text"]


# -- keys ----------------------------------------------------------------------------------------------------------


def test_the_usual_variable_is_for_this_machine_and_for_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-usual")

    for url in ("http://localhost:1/v1", "http://127.0.0.1:1/v1", "https://api.example.com/v1"):
        key = find_key(url)
        assert key is not None
        assert key.reveal() == "sk-usual"
    assert find_key("http://example.com/v1") is None
    named = find_key("http://example.com/v1", "OPENAI_API_KEY")
    assert named is not None


def test_a_variable_that_is_not_set_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)

    with pytest.raises(MlxNbError, match="NO_SUCH_KEY is not set"):
        find_key("http://localhost/v1", "NO_SUCH_KEY")
    with pytest.raises(MlxNbError, match="not both"):
        find_key("http://localhost/v1", "NO_SUCH_KEY", ask=True)


@pytest.mark.parametrize("secret", ["sk-hidden\nX: y", "sk-hidden\u20ac", "sk hidden"])
def test_a_key_that_no_header_takes_is_refused_unseen(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv("MY_KEY", secret)

    with pytest.raises(MlxNbError, match="the key from MY_KEY has") as refused:
        find_key("http://localhost/v1", "MY_KEY")
    assert "hidden" not in str(refused.value)


def test_a_key_in_the_place_of_its_variables_name_is_not_shown() -> None:
    with pytest.raises(MlxNbError, match="never the key") as refused:
        find_key("http://localhost/v1", "sk-hidden")
    assert "hidden" not in str(refused.value)


def test_a_key_can_be_asked_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getpass", lambda _: " sk-typed ")
    server = serve(answering("hello"), key="sk-typed")
    mlx_nb.connect(server.url, ask_key=True)

    assert mlx_nb.generate("Say hello").text == "hello"
    monkeypatch.setattr("getpass.getpass", lambda _: "")
    with pytest.raises(MlxNbError, match="no key was given"):
        find_key(server.url, ask=True)


def test_a_key_is_in_no_checkpoint_and_no_result(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-hidden")
    server = serve(repeats, fails(401, "wrong key: sk-hidden"), repeats, key="sk-hidden")
    mlx_nb.connect(server.url, key_env="MY_KEY", concurrency=1)
    frame = mlx_nb.generate_frame(FRAME, "Say {{ text }}", temperature=0, checkpoint=tmp_path / "rows.db")

    assert list(frame.state.astype(str)).count("failed") >= 1
    assert "sk-hidden" not in frame.to_json()
    assert all(b"sk-hidden" not in file.read_bytes() for file in tmp_path.iterdir())
    assert "sk-hidden" not in repr(default_session().engines)


# -- rows of frames ------------------------------------------------------------------------------------------------


def test_rows_are_answered_and_equal_ones_asked_once(serve: Serve) -> None:
    server = serve(repeats)
    mlx_nb.connect(server.url)
    frame = mlx_nb.generate_frame(FRAME, "Say {{ text }}", temperature=0)

    assert list(frame.text) == ["one", "two", "three", "two"]
    assert len(server.asked) == 3


def test_columns_are_typed_where_the_server_keeps_to_a_schema(serve: Serve) -> None:
    def age(handler: Any, body: dict[str, Any]) -> None:
        schema = body["response_format"]["json_schema"]["schema"]
        says(json.dumps(dict.fromkeys(schema["properties"], 7)))(handler, body)

    mlx_nb.connect(serve(age).url)
    frame = mlx_nb.extract_frame(FRAME, AGE, "How old is {{ text }}?", temperature=0)

    assert list(frame["age"]) == [7, 7, 7, 7]
    assert str(frame["age"].dtype) == "Int64"


def test_labels_are_chosen_where_the_server_keeps_to_choices(serve: Serve) -> None:
    def first(handler: Any, body: dict[str, Any]) -> None:
        says(body["structured_outputs"]["choice"][0])(handler, body)

    mlx_nb.connect(serve(first).url)
    frame = mlx_nb.classify_frame(FRAME, ["good", "bad"], "How is {{ text }}?", temperature=0)

    assert list(frame["label"].astype(str)) == ["good"] * 4


def test_a_preview_shows_what_is_sent_and_counts_nothing(serve: Serve) -> None:
    server = serve()
    mlx_nb.connect(server.url)
    preview = mlx_nb.preview_frame(FRAME, "Say {{ text }}", system="Be brief.", rows=2, max_tokens=9)

    assert preview.frame["prompt"][0] == "system: Be brief.\n\nuser: Say one"
    assert preview.frame["prompt_tokens"].isna().all()
    assert preview.prompt_tokens is None
    assert str(preview).startswith("4 answers, at most 36 new tokens")
    assert server.asked == []


def test_each_row_brings_its_picture(serve: Serve) -> None:
    image = pytest.importorskip("PIL.Image")
    server = serve(answering("a square"))
    mlx_nb.connect(server.url)
    frame = FRAME.assign(picture=[image.new("RGB", (n, n)) for n in (1, 2, 3, 4)])
    result = mlx_nb.generate_frame(frame, "What is {{ text }}?", images="picture", temperature=0)

    assert list(result.text) == ["a square"] * 4
    assert len(server.asked) == 4
    preview = mlx_nb.preview_frame(frame, "What is {{ text }}?", images="picture")
    assert list(preview.frame["state"]) == ["ready"] * 4


def test_a_checkpoint_is_of_one_server_and_model(serve: Serve, tmp_path: Path) -> None:
    one, two = serve(repeats), serve(repeats)
    for server in (one, one, two):
        mlx_nb.connect(server.url)
        mlx_nb.generate_frame(FRAME, "Say {{ text }}", temperature=0, checkpoint=tmp_path / "rows.db")
        mlx_nb.stop()

    assert (len(one.asked), len(two.asked)) == (3, 3)
