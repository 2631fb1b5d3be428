"""Commands that are built when they are called, so that the help of their group does not wait for torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from tether.errors import unknown


class Group(TyperGroup):
    """Commands by name."""

    #: what its commands are called in errors
    kind: ClassVar[str] = "command"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise unknown(self.kind, args[0], self.commands)
        return super().resolve_command(ctx, args)


class Deferred(TyperCommand):
    """Represents in its group a command that `load` builds."""

    load: Callable[[], Any]

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)


def defer(app: typer.Typer, name: str, line: str, function: Callable[[], Callable[..., None]]) -> None:
    """Add a command; `line` is its line in the help of the group, and `function` gives what it runs."""

    def load() -> Any:
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        command = function()
        single.command(name, context_settings=getattr(command, "context_settings", None))(command)
        return typer.main.get_command(single)

    app.command(name, cls=type("Deferred", (Deferred,), {"load": staticmethod(load)}), help=line)(lambda: None)
