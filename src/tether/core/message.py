"""Messages between nodes, and the values by which collectives and timers are named."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar, cast, get_args

import msgspec
from torch import Tensor

M = TypeVar("M")


#: a row of metrics
Row = dict[str, float | int | str | list[int]]


class Message(msgspec.Struct, frozen=True, tag=True):
    """What nodes send to each other. Subclasses name their fields; tensors travel as raw frames."""


class Stream(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Broadcasts of one kind, of which a later one supersedes an earlier one, and the reductions that they answer.

    Different parts of the vector have streams of their own.
    """

    name: str
    shard: int | None = None

    def __str__(self) -> str:
        return self.name if self.shard is None else f"{self.name} {self.shard}"


class Tag(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One reduction. Those of a stream follow each other with growing numbers."""

    stream: Stream
    number: int

    def __str__(self) -> str:
        return f"{self.stream} {self.number}"


class Timer(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A timer of one node. `numbers` tell timers of one name apart, such as those of shards or rounds."""

    name: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(map(str, (self.name, *self.numbers)))


class ReplicaState(Message, frozen=True):
    """The result of `Replica.state` as it travels: its plain values, and the tensors that they refer to."""

    values: Any
    tensors: list[Tensor]


def tensors_of(message: Message) -> list[Tensor]:
    """The tensors in a message: its fields, what tuples and lists of tensors hold, and those of messages inside it."""
    found: list[Tensor] = []
    for name in _tensor_fields(type(message)):
        value = getattr(message, name)
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Message):
            found += tensors_of(value)
        elif isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor):
            found += value
    return found


@cache
def _tensor_fields(message_type: type[Message]) -> tuple[str, ...]:
    """The fields of a message that can hold tensors, by their types."""
    fields = msgspec.structs.fields(message_type)
    return tuple(field.name for field in fields if _can_hold_tensors(field.type))


def _can_hold_tensors(annotation: Any) -> bool:
    if annotation is Any or isinstance(annotation, TypeVar):
        return True
    if isinstance(annotation, type) and issubclass(annotation, Tensor | Message):
        return True
    return any(map(_can_hold_tensors, get_args(annotation)))


def with_tensors(message: M, tensors: Iterable[Tensor]) -> M:
    """The same message with other tensors, in the order of `tensors_of`."""
    left = iter(tensors)

    def renewed(value: Any) -> Any:
        match value:
            case Tensor():
                return next(left)
            case Message():
                fields = {name: renewed(getattr(value, name)) for name in value.__struct_fields__}
                return msgspec.structs.replace(value, **fields)
            case [Tensor(), *_]:
                return type(value)(next(left) for _ in value)
        return value

    return cast(M, renewed(message))
