"""Python functions as tools of a model: their schemas, and calling them with what the model wrote.

A schema comes from the signature's annotations and the docstring. A model's arguments are checked against the
annotations before the function runs; whatever goes wrong then is told to the model as the call's result, so that it
can do better. Refused are functions that can't be described: without a name, or with ``*args``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
import itertools
import json
import queue
import re
import textwrap
import threading
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import MlxNbError

__all__ = ["Called", "Tool", "ToolError", "Tools"]


class ToolError(MlxNbError, ValueError):
    """A function that can't be a tool, or arguments that it can't be called with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Called:
    """A call of a model, and what came of it.

    Attributes
    ----------
    name : str
    arguments : dict
    content : str or None
        The result as the model is told it; None for a call that was not carried out.
    failed : bool
    """

    name: str
    arguments: dict[str, Any]
    content: str | None = None
    failed: bool = False

    def __str__(self) -> str:
        """As Python would write it: ``weather(city='Paris') → sunny``."""
        call = f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"
        return call if self.content is None else f"{call} → {self.content}"

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Called:
        """A call as the engine gives it, not carried out."""
        try:
            arguments = _as_dict(call.get("arguments"))
        except ToolError:
            arguments = {"arguments": call.get("arguments")}
        return cls(str(call.get("name")), arguments)


class Tool:
    """A function that a model may call.

    Parameters
    ----------
    function : callable
        Plain or ``async``. Its name, annotations, defaults and docstring (NumPy, Google or Sphinx style) are what
        the model gets to know.

    Raises
    ------
    ToolError
        When it has no usable signature.

    Attributes
    ----------
    schema : dict
        ``{"type": "function", "function": {"name", "description", "parameters"}}``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        if not self.name.isidentifier():
            raise ToolError(f"a tool needs a name: define {self.name} with def")
        self._signature = self._read_signature()
        self._types = self._read_types()
        self.schema = self._describe()

    def _read_signature(self) -> inspect.Signature:
        if not callable(self.function):
            raise ToolError(f"{self.name} is no function")
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):
            raise ToolError(
                f"{self.name} tells nothing of its arguments: wrap it in a function that does"
            ) from None
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise ToolError(
                    f"{self.name} takes *{parameter.name}, which a model can't fill: name its arguments"
                )
        return signature

    def _read_types(self) -> dict[str, Any]:
        target = self.function if inspect.isroutine(self.function) else type(self.function).__call__
        if inspect.isclass(self.function):
            target = self.function.__init__
        try:
            return typing.get_type_hints(target, include_extras=True)
        except Exception as error:  # an annotation is evaluated: it may raise anything
            raise ToolError(f"an annotation of {self.name} can't be read: {error}") from error

    def _describe(self) -> dict[str, Any]:
        summary, notes = _documented(inspect.getdoc(self.function) or "")
        properties: dict[str, Any] = {}
        required: list[str] = []
        parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                parameters["additionalProperties"] = True
                continue
            schema = self._schema_of(name)
            if name in notes:
                schema["description"] = notes[name]
            if parameter.default is parameter.empty:
                required.append(name)
            elif parameter.default is not None and _is_json(parameter.default):
                schema["default"] = parameter.default
            properties[name] = schema
        return {
            "type": "function",
            "function": {"name": self.name, "description": summary, "parameters": parameters},
        }

    def _schema_of(self, name: str) -> dict[str, Any]:
        try:
            return _schema(self._types.get(name, Any))
        except ToolError as error:
            raise ToolError(f"{self.name}({name}): {error}") from None

    def bind(self, arguments: Any) -> inspect.BoundArguments:
        """Arguments that fit the signature, each of its annotation's type.

        Parameters
        ----------
        arguments : mapping or JSON text
            Text is read where a number or the like belongs ("3" for an int), since models write it.

        Raises
        ------
        ToolError
            One line that says what doesn't fit.
        """
        given = _as_dict(arguments)
        parameters = self._signature.parameters
        rest = next((name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
        known = [name for name in parameters if name != rest]
        unknown = [name for name in given if name not in known]
        if unknown and rest is None:
            raise ToolError(f"{self.name} takes no {unknown[0]!r}; it takes {', '.join(known) or 'nothing'}")
        bound = self._signature.bind_partial()
        for name in known:
            if name in given:
                bound.arguments[name] = self._fitted(name, given[name])
            elif parameters[name].default is inspect.Parameter.empty:
                raise ToolError(f"{self.name} needs {name!r}")
        if rest is not None and unknown:
            bound.arguments[rest] = {name: self._fitted(rest, given[name]) for name in unknown}
        return bound

    def _fitted(self, name: str, value: Any) -> Any:
        try:
            return _fit(self._types.get(name, Any), value)
        except ToolError as error:
            raise ToolError(f"{self.name}({name}=…) takes {error}, got {value!r}") from None

    def start(self, arguments: Any) -> Any:
        """Call it; the value, or what to await for it."""
        bound = self.bind(arguments)
        bound.apply_defaults()
        return self.function(*bound.args, **bound.kwargs)


class Tools:
    """The tools of one prompt, by name.

    Parameters
    ----------
    functions : iterable of callable
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._tools: dict[str, Tool] = {}
        for function in functions:
            tool = Tool(function)
            if tool.name in self._tools:
                raise ToolError(f"two tools are called {tool.name}: rename one")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the chat template is told."""
        return [tool.schema for tool in self._tools.values()]

    def start(self, call: Mapping[str, Any]) -> Called | Awaitable[Called]:
        """Carry out a call: what came of it, or for an ``async`` function what to await for that.

        KeyboardInterrupt and the like pass; any other failure is the call's result.
        """
        asked = Called.of(call)
        try:
            value = self._start(call)
            return _later(asked, value) if inspect.isawaitable(value) else _answered(asked, value)
        except Exception as error:
            return _failed(asked, error)

    def run(self, call: Mapping[str, Any]) -> Called:
        """`start` for a plain thread; an ``async`` function gets a loop of its own."""
        started = self.start(call)
        return started if isinstance(started, Called) else _wait(started)

    def _start(self, call: Mapping[str, Any]) -> Any:
        name = call.get("name")
        tool = self._tools.get(str(name))
        if tool is None:
            raise ToolError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
        return tool.start(call.get("arguments"))


async def _later(asked: Called, value: Awaitable[Any]) -> Called:
    try:
        return _answered(asked, await value)
    except Exception as error:
        return _failed(asked, error)


def _answered(asked: Called, value: Any) -> Called:
    return dataclasses.replace(asked, content=value if isinstance(value, str) else _written(value))


def _failed(asked: Called, error: Exception) -> Called:
    text = " ".join(str(error).split())
    kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
    return dataclasses.replace(asked, content=f"error: {kind}{text}", failed=True)


def _written(value: Any) -> str:
    if hasattr(value, "model_dump_json"):
        return str(value.model_dump_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _wait(value: Awaitable[Called]) -> Called:
    """What it gives, from a loop on another thread: this one's may be running."""
    outcome: queue.SimpleQueue[Called | BaseException] = queue.SimpleQueue()

    async def run() -> Called:
        return await value

    def work() -> None:
        try:
            outcome.put(asyncio.run(run()))
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=work, name="mlx_nb tool", daemon=True).start()
    called = outcome.get()
    if isinstance(called, BaseException):
        raise called
    return called


def _as_dict(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise ToolError(f"the arguments are no JSON: {error}") from None
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ToolError(f"the arguments must be an object, got {arguments!r}")
    return {str(name): value for name, value in arguments.items()}


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


# -- annotations ------------------------------------------------------------------------------------------

_PLAIN: dict[Any, tuple[str, str]] = {
    str: ("string", "a text"),
    int: ("integer", "a whole number"),
    float: ("number", "a number"),
    bool: ("boolean", "true or false"),
    type(None): ("null", "null"),
}
_LISTS = (list, tuple, set, frozenset, Sequence, Iterable)


def _schema(kind: Any) -> dict[str, Any]:
    """JSON schema of an annotation; ToolError for one that JSON has nothing for."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, inspect.Parameter.empty, object):
        return {}
    if origin is typing.Annotated:
        notes = [str(getattr(note, "description", None) or note) for note in parts[1:]]
        return {**_schema(parts[0]), "description": notes[0]}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind][0]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(part) for part in parts]}
    if origin is typing.Literal:
        return {"enum": list(parts)}
    return _schema_of_many(kind, origin or kind, parts)


def _schema_of_many(kind: Any, origin: Any, parts: tuple[Any, ...]) -> dict[str, Any]:
    if origin in _LISTS:
        items = [part for part in parts if part is not Ellipsis]
        if origin is tuple and len(items) > 1:
            return {
                "type": "array",
                "prefixItems": [_schema(part) for part in items],
                "minItems": len(items),
                "maxItems": len(items),
            }
        return {"type": "array"} | ({"items": _schema(items[0])} if items else {})
    if origin in (dict, Mapping):
        return {"type": "object"} | ({"additionalProperties": _schema(parts[1])} if parts else {})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if hasattr(kind, "model_json_schema"):
        return dict(kind.model_json_schema())
    if dataclasses.is_dataclass(kind):
        return _schema_of_fields(kind)
    raise ToolError(
        f"a model can't write a {getattr(kind, '__name__', kind)}: take text or numbers, and convert"
    )


def _schema_of_fields(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    missing = dataclasses.MISSING
    return {
        "type": "object",
        "properties": {field.name: _schema(hints[field.name]) for field in fields},
        "required": [f.name for f in fields if f.default is missing and f.default_factory is missing],
    }


def _fit(kind: Any, value: Any) -> Any:
    """The value as its annotation's type; ToolError says what would fit."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, inspect.Parameter.empty, object):
        return value
    if origin is typing.Annotated:
        return _fit(parts[0], value)
    if kind in _PLAIN:
        return _fit_plain(kind, value)
    if origin in (typing.Union, types.UnionType):
        return _fit_any(parts, value)
    if origin is typing.Literal:
        return _one_of(dict(zip(parts, parts, strict=True)), value)
    return _fit_many(kind, origin or kind, parts, value)


def _fit_plain(kind: Any, value: Any) -> Any:
    if isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool):
        return value
    if isinstance(value, str) and kind is not str:
        try:
            value = json.loads(value.strip().lower() if kind is bool else value)
        except ValueError:
            raise ToolError(_PLAIN[kind][1]) from None
        return _fit_plain(kind, value) if not isinstance(value, str) else _refuse(kind)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number:
        return float(value)
    if kind is int and number and float(value).is_integer():
        return int(value)
    return _refuse(kind)


def _refuse(kind: Any) -> Any:
    raise ToolError(_PLAIN[kind][1])


def _fit_any(parts: tuple[Any, ...], value: Any) -> Any:
    """The first of several types that fits; one that the value already has goes first."""
    exact = [part for part in parts if isinstance(part, type) and type(value) is part]
    wanted = []
    for part in [*exact, *parts]:
        try:
            return _fit(part, value)
        except ToolError as error:
            wanted.append(str(error))
    raise ToolError(" or ".join(dict.fromkeys(wanted)))


def _one_of(values: dict[Any, Any], value: Any) -> Any:
    for known, meant in values.items():
        if known == value and isinstance(known, bool) == isinstance(value, bool):
            return meant
    raise ToolError(f"one of {', '.join(map(repr, values))}")


def _fit_many(kind: Any, origin: Any, parts: tuple[Any, ...], value: Any) -> Any:
    if origin in _LISTS:
        return _fit_list(origin, parts, value)
    if origin in (dict, Mapping):
        value = _decoded(value, Mapping, "an object")
        return {key: _fit(parts[1], item) if parts else item for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _one_of({member.value: member for member in kind}, value)
    value = _decoded(value, Mapping, "an object")
    if hasattr(kind, "model_validate"):
        try:
            return kind.model_validate(value)
        except ValueError as error:
            raise ToolError(f"a {kind.__name__} ({' '.join(str(error).split())})") from None
    return _fit_fields(kind, value)


def _fit_list(origin: Any, parts: tuple[Any, ...], value: Any) -> Any:
    value = _decoded(value, list | tuple, "a list")
    make = origin if origin in (tuple, set, frozenset) else list
    items = [part for part in parts if part is not Ellipsis]
    if origin is tuple and len(items) > 1:
        if len(value) != len(items):
            raise ToolError(f"a list of {len(items)}")
        return tuple(_fit(part, item) for part, item in zip(items, value, strict=True))
    return make(_fit(items[0], item) if items else item for item in value)


def _fit_fields(kind: Any, value: Any) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    try:
        return kind(**{name: _fit(hints.get(name, Any), item) for name, item in value.items()})
    except TypeError as error:
        raise ToolError(f"a {kind.__name__} ({error})") from None


def _decoded(value: Any, kind: Any, called: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ToolError(called) from None
    if not isinstance(value, kind):
        raise ToolError(called)
    return value


# -- docstrings -------------------------------------------------------------------------------------------

_HEADING = re.compile(r"(?:Parameters|Args|Arguments|Returns?|Raises|Yields?|Examples?|Notes?|See Also):?$")
_NUMPY = re.compile(r"(?P<names>\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")
_GOOGLE = re.compile(r"(?P<names>\w+)\s*(?:\([^)]*\))?:\s*(?P<note>.*)$")
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(?P<names>\w+):\s*(?P<note>.*)$")


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, up to its first section, and of each parameter."""
    lines = text.splitlines()
    end = next((i for i, line in enumerate(lines) if _HEADING.match(line) or line[:1] == ":"), len(lines))
    return " ".join(" ".join(lines[:end]).split()), _notes(lines[end:])


def _notes(lines: list[str]) -> dict[str, str]:
    begin = next((i for i, line in enumerate(lines) if line.startswith(("Parameters", "Arg"))), None)
    if begin is None:
        return _entries(lines, _SPHINX)
    body = list(itertools.takewhile(lambda line: not _HEADING.match(line), lines[begin + 1 :]))
    if body and body[0].startswith("---"):
        return _entries(body[1:], _NUMPY)
    return _entries(textwrap.dedent("\n".join(body)).splitlines(), _GOOGLE)


def _entries(lines: list[str], head: re.Pattern[str]) -> dict[str, str]:
    """Notes of parameters: each begins with a line that isn't indented, and goes on with lines that are."""
    notes: dict[str, list[str]] = {}
    names: list[str] = []
    for line in lines:
        if line[:1].isspace():
            words = line
        else:
            found = head.match(line)
            names = [name.strip() for name in found["names"].split(",")] if found else []
            words = found.groupdict().get("note", "") if found else ""
        for name in names:
            notes.setdefault(name, []).append(words)
    joined = {name: " ".join(" ".join(words).split()) for name, words in notes.items()}
    return {name: note for name, note in joined.items() if note}
