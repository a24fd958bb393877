"""Whether the fixture that both sides of the wire check has the fields that the protocol names."""

import typing
from typing import Any


def check_fields(value: Any, hint: Any) -> None:
    """Compare the keys of `value` with those of the TypedDict `hint`, and so on within."""
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint)
        assert set(value) == set(hints), hint.__name__
        for name, inner in hints.items():
            check_fields(value[name], inner)
    elif typing.get_origin(hint) is list:
        for item in value:
            check_fields(item, typing.get_args(hint)[0])
