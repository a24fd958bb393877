"""``{{ name }}`` in a prompt.

Double braces only: single braces are always literal, and what a variable holds is never expanded again. Blocks
(``{% if … %}``) are for DataFrame templates; in a cell they are literal too.
"""

from __future__ import annotations

import builtins
import contextlib
import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import TemplateError

__all__ = ["Template"]

_NEVER = "\x00{}\x00"
"""A delimiter that no prompt holds: switches a piece of Jinja's syntax off."""

_SELF = "_self_"
"""Stands in for ``self``, which Jinja keeps for itself: here it is a name like any other."""


class Template:
    """A prompt with names to fill in.

    Raises
    ------
    TemplateError
        For text that doesn't parse.

    Attributes
    ----------
    names : frozenset of str
        Variables it uses.
    """

    def __init__(self, text: str, *, blocks: bool = False) -> None:
        self.text = text
        self._blocks = blocks
        self.names: frozenset[str] = frozenset()
        self._compiled: Any = None
        if "{{" in text or (blocks and "{%" in text):
            self._compile(text, blocks)

    def _compile(self, text: str, blocks: bool) -> None:
        import jinja2
        import jinja2.meta

        environment = _environment(blocks)
        try:
            parsed = environment.parse(text)
            for name in parsed.find_all(jinja2.nodes.Name):
                if name.name == "self":
                    name.name = _SELF
            names = jinja2.meta.find_undeclared_variables(parsed)
            self.names = frozenset("self" if name == _SELF else name for name in names)
            self._compiled = environment.from_string(parsed)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the prompt's {{{{ }}}} can't be read (line {error.lineno}: {error.message}): correct it, or write "
                "{{ '{{' }} for two braces"
            ) from error

    def keys(self, name: str) -> frozenset[Any] | None:
        """The constants by which it looks into a name, ``row["my column"]``; None if it does more with it."""
        import jinja2.nodes as syntax

        parsed = _environment(self._blocks).parse(self.text)
        uses = sum(node.name == name for node in parsed.find_all(syntax.Name))
        keys: list[Any] = []
        for node in parsed.find_all((syntax.Getitem, syntax.Getattr)):
            if not isinstance(node.node, syntax.Name) or node.node.name != name:
                continue
            if isinstance(node, syntax.Getattr):
                if not hasattr(dict, node.attr):  # row.items() is about all keys
                    keys.append(node.attr)
            elif isinstance(node.arg, syntax.Const | syntax.Tuple):
                with contextlib.suppress(syntax.Impossible, TypeError):
                    keys.append(node.arg.as_const())
                    hash(keys[-1])
        return frozenset(keys) if len(keys) == uses else None

    def require(self, known: Iterable[str], *, kind: str = "name") -> None:
        """Raise TemplateError if the template uses a name that isn't `known`, nor one of Python's own."""
        names = set(known)
        for name in sorted(self.names - names):
            if not hasattr(builtins, name):
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise TemplateError(
                    f"the prompt uses {{{{ {name} }}}}, and there is no {kind} {name!r}{hint}"
                )

    def render(self, values: Mapping[str, Any]) -> str:
        """The text with its values in place; what an expression raises comes as TemplateError."""
        if self._compiled is None:
            return self.text
        context = {
            _SELF if name == "self" else name: values[name]
            if name in values
            else getattr(builtins, name, None)
            for name in self.names
        }
        try:
            return str(self._compiled.render(context))
        except Exception as error:
            raise TemplateError(f"the prompt's {{{{ }}}} failed: {type(error).__name__}: {error}") from error


@functools.cache
def _environment(blocks: bool) -> Any:
    import jinja2

    syntax: dict[str, Any] = {
        "comment_start_string": _NEVER.format("c"),
        "comment_end_string": _NEVER.format("/c"),
    }
    if not blocks:
        syntax |= {"block_start_string": _NEVER.format("b"), "block_end_string": _NEVER.format("/b")}
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        **syntax,
    )
    environment.globals.clear()  # or a variable called "namespace" or "dict" would give way to Jinja's own
    return environment
