"""Options given as text: lists the parameters of a constructor, and converts NAME=VALUE into its arguments.

Tasks and protocols are configured through the parameters of their constructors. Types and defaults come from there, so
nothing about an option is written twice.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tether.errors import UsageError, unknown


class Option(NamedTuple):
    """One option, as text to show."""

    name: str
    type: str
    default: str
    doc: str


def options(cls: type, docs: typing.Mapping[str, str]) -> list[Option]:
    """The options of a class, in the order of its constructor."""
    return [
        Option(
            name,
            _type_text(type_of(cls, parameter)),
            "required" if parameter.default is parameter.empty else _value_text(parameter.default),
            docs.get(name, ""),
        )
        for name, parameter in parameters(cls).items()
    ]


def arguments(cls: type, what: str, settings: typing.Mapping[str, str]) -> dict[str, Any]:
    """The constructor's arguments, converted from text."""
    known = parameters(cls)
    found: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in known:
            raise unknown(f"option of {what}", name, known)
        found[name] = convert(f"option {name} of {what}", text, type_of(cls, known[name]))
    return found


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    """The constructor's named parameters."""
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: p for name, p in inspect.signature(cls).parameters.items() if p.kind not in skipped}


def type_of(cls: type, parameter: inspect.Parameter) -> Any:
    """The annotation; without one, or if it cannot be evaluated, the type of the default."""
    # a dataclass may inherit fields from another module, and only there can their annotations be evaluated
    annotated = cls if dataclasses.is_dataclass(cls) else cls.__init__  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(annotated)
    except (NameError, TypeError):  # such as a name imported only for type checkers
        hints = {}
    if parameter.name in hints:
        return hints[parameter.name]
    return str if parameter.default in (parameter.empty, None) else type(parameter.default)


_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def convert(what: str, text: str, kind: Any) -> Any:
    """Convert text to a value of that type; raises UsageError if that is impossible."""
    for member in _members(kind):
        choices = {str(choice): choice for choice in typing.get_args(member)}
        if typing.get_origin(member) is Literal and text in choices:
            return choices[text]
        if member is type(None) and text.lower() == "none":
            return None
        if member is bool and text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
        if member in (int, float, str, Path):
            try:
                return member(text)
            except ValueError:
                continue
    raise UsageError(f"{what} is {text!r}; expected {_type_text(kind)}")


def check_types(options: Any, what: str) -> None:
    """Refuse a dataclass in which a field holds a value of another type than its annotation."""
    for name, kind in _field_types(options.__class__).items():
        value = getattr(options, name)
        if not any(_fits(value, member) for member in _members(kind)):
            raise UsageError(f"option {name} of {what} is {value!r}; expected {_type_text(kind)}")


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    known = parameters(cls)
    return {field.name: type_of(cls, known[field.name]) for field in dataclasses.fields(cls)}


def _fits(value: object, kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if kind in (int, float) and isinstance(value, bool):
        return False
    plain = typing.get_origin(kind) or kind
    return not isinstance(plain, type) or isinstance(value, (int, float) if plain is float else plain)


def _members(kind: Any) -> list[Any]:
    """The alternatives of a union, or the type alone."""
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return list(typing.get_args(kind)) if union else [kind]


def _type_text(kind: Any) -> str:
    members = [member for member in _members(kind) if member is not type(None)]
    if len(members) > 1:
        shown = [member for member in members if not (member is str and Path in members)]
        return " | ".join(_type_text(member) for member in shown)
    kind = members[0]
    if typing.get_origin(kind) is Literal:
        return " | ".join(str(choice) for choice in typing.get_args(kind))
    named = {bool: "true | false", Path: "path", str: "text", int: "whole number", float: "number"}
    return str(named.get(kind, getattr(kind, "__name__", kind)))


def _value_text(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
