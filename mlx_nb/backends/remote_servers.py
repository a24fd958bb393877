"""What servers of OpenAI's API understand, and a request in their words.

Each kind takes other parameters beside those of the API. What a server would ignore is refused here, in one line.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..errors import RequestError
from ..request import Chat, Request
from ..sampling import SamplingParams

__all__ = ["PYTHONS", "SERVERS", "Server", "as_sent", "kind_of"]

_API = {"max_tokens", "temperature", "top_p", "stop"}
_DEFAULTS = SamplingParams()
_WHOLE_WINDOW = 2**30
"""Tokens of a window that reaches over any prompt."""


@dataclass(frozen=True, slots=True)
class Server:
    """A kind of server.

    Attributes
    ----------
    name : str
        As of ``--server``.
    takes : frozenset of str
        Fields of `SamplingParams` that it honours.
    thinking : {"no", "template", "body"}
        Whether thinking can be switched, and where that is said.
    only_chat : frozenset of str
        Those of them that raw prompts can't have.
    counts_raw : bool
        Whether it counts tokens of raw prompts too.
    most_stops : int, optional
    """

    name: str
    takes: frozenset[str]
    thinking: Literal["no", "template", "body"] = "no"
    only_chat: frozenset[str] = frozenset({"thinking"})
    counts_raw: bool = True
    most_stops: int | None = None

    def check(self, request: Request) -> None:
        """RequestError for what can't be passed on."""
        params = request.params
        raw = isinstance(request.asked, str)
        for name in _asked(params):
            if name not in self.takes:
                raise RequestError(self._refusal(name))
            if raw and name in self.only_chat:
                raise RequestError(f"{name} goes with messages, not with a raw prompt: leave it out, or raw")
        if self.most_stops is not None and len(params.stop or ()) > self.most_stops:
            raise RequestError(f"the server takes {self.most_stops} stop strings at most: give fewer")
        if request.sparse_prefill is not None:
            raise RequestError("a server reads its prompts its own way: leave sparse_prefill out")
        if raw and request.tools:
            raise RequestError("tools act through the chat template: leave them out, or raw")

    def _refusal(self, name: str) -> str:
        if name == "logits_processors":
            return "logits_processors are functions of this process, and a server takes none: leave them out"
        if name == "logprobs":
            return "log-probabilities of tokens are for engines of this process: leave logprobs out"
        if name == "repetition_window" and "repetition_penalty" in self.takes:
            return "the server's repetition penalty is over all tokens: leave repetition_window out"
        what = "structured output" if name in _STRUCTURE else name
        hint = (
            "" if self.name != "openai" else "; if it does, say what it is: --server vllm, vllm-mlx or mlx-lm"
        )
        kind = "this server" if self.name == "openai" else f"a server of the kind {self.name}"
        about = f" ({name})" if name in _STRUCTURE else ""
        return f"{kind} has no {what}{about}: leave it out, or use an engine of this process{hint}"

    def body(self, request: Request) -> dict[str, Any]:
        """The request as JSON, but for model, messages or prompt, and ``stream``."""
        params = request.params
        body: dict[str, Any] = {
            name: getattr(params, name) for name in ("max_tokens", "temperature", "top_p")
        }
        if params.stop:
            body["stop"] = list(params.stop)
        for name in _asked(params):
            body |= _WRITERS[name](self, params) if name in _WRITERS else {name: getattr(params, name)}
        if request.tools:
            body["tools"] = list(request.tools)
        if self.counts_raw or isinstance(request.asked, Chat):
            body["stream_options"] = {"include_usage": True}
        return body


_STRUCTURE = ("schema", "regex", "choices", "grammar")


def _asked(params: SamplingParams) -> list[str]:
    """Fields that ask for something beside the API's basic parameters."""
    names = (field.name for field in fields(params) if field.name not in _API)
    return [name for name in names if getattr(params, name) not in (getattr(_DEFAULTS, name), ())]


_Writer = Callable[[Server, SamplingParams], dict[str, Any]]


def _schema(_: Server, params: SamplingParams) -> dict[str, Any]:
    schema = {"name": "answer", "schema": params.json_schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _structure(name: str, new: str) -> _Writer:
    """As vLLM takes it; older releases know the second form, and each passes over the other's."""

    def write(_: Server, params: SamplingParams) -> dict[str, Any]:
        value = getattr(params, name)
        value = list(value) if isinstance(value, tuple) else value
        return {"structured_outputs": {new: value}, f"guided_{new}": value}

    return write


def _bias(_: Server, params: SamplingParams) -> dict[str, Any]:
    return {"logit_bias": {str(token): value for token, value in (params.logit_bias or {}).items()}}


def _repetition(server: Server, params: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {"repetition_penalty": params.repetition_penalty}
    if "repetition_window" in server.takes:
        body["repetition_context_size"] = params.repetition_window or _WHOLE_WINDOW
    return body


def _thinking(server: Server, params: SamplingParams) -> dict[str, Any]:
    said = {"enable_thinking": params.thinking}
    return said if server.thinking == "body" else {"chat_template_kwargs": said}


_WRITERS: Mapping[str, _Writer] = {
    "schema": _schema,
    "regex": _structure("regex", "regex"),
    "choices": _structure("choices", "choice"),
    "grammar": _structure("grammar", "grammar"),
    "logit_bias": _bias,
    "repetition_penalty": _repetition,
    "repetition_window": lambda *_: {},  # written with the penalty
    "thinking": _thinking,
}


def as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the API has it: pictures are URLs, and the arguments of calls are text. It may take a while."""
    sent = dict(message)
    if not isinstance(message.get("content"), str | None):
        sent["content"] = [_part(part) for part in message["content"]]
    if message.get("tool_calls"):
        sent["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return sent


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image":
        return dict(part)
    picture = part["image"]
    png = picture.thumbnail_png(max(picture.width, picture.height))
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"},
    }


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": function}


_STANDARD = {"seed", "presence_penalty", "frequency_penalty", "logit_bias"}

SERVERS: Mapping[str, Server] = {
    server.name: server
    for server in (
        Server("openai", frozenset(_STANDARD | {"schema"}), only_chat=frozenset({"schema"}), most_stops=4),
        Server(
            "vllm",
            frozenset(
                _STANDARD
                | {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "thinking"}
                | {*_STRUCTURE}
            ),
            thinking="template",
        ),
        Server(
            "vllm-mlx",
            frozenset({"top_k", "min_p", "presence_penalty", "repetition_penalty", "schema", "thinking"}),
            thinking="body",
            only_chat=frozenset({"schema", "thinking"}),
            counts_raw=False,
        ),
        Server(
            "mlx-lm",
            frozenset(_STANDARD | {"top_k", "min_p", "repetition_penalty", "repetition_window", "thinking"}),
            thinking="template",
        ),
    )
}

PYTHONS = "BaseHTTP/"
"""How Python's own HTTP server begins to say what it is."""

_OWNERS = {"vllm": "vllm", "vllm-mlx": "vllm-mlx"}


def kind_of(models: Sequence[Mapping[str, Any]], software: str) -> Server:
    """What a server is, told by the models it lists and its ``Server`` header."""
    for model in models:
        if (kind := _OWNERS.get(str(model.get("owned_by")))) is not None:
            return SERVERS[kind]
    # mlx_lm.server stands on Python's own HTTP server and names no owners.
    if software.startswith(PYTHONS) and not any("owned_by" in model for model in models):
        return SERVERS["mlx-lm"]
    return SERVERS["openai"]
