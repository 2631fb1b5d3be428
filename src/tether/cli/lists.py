"""`tether protocols` and `tether tasks`: the protocols and tasks to choose from."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from tether import protocols as protocol_names
from tether import tasks as task_names
from tether.cli.build import protocol_class
from tether.cli.output import out
from tether.core import settings


def protocols(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="List only this protocol.")] = None,
) -> None:
    """List the protocols: when to choose each, its options and their defaults."""
    for cls in list(protocol_names.known().values()) if name is None else [protocol_class(name)]:
        docs = {field.name: field.metadata.get("doc", "") for field in fields(cls)}
        _print_entry(cls.name, f"{cls.summary}\n  for {cls.suits}", settings.options(cls, docs))
    out.print("How they compare, in figures: docs/protocols.md", style="dim")


def tasks() -> None:
    """List the built-in tasks with their options and defaults."""
    for name, cls in task_names.known().items():
        _print_entry(name, (cls.__doc__ or "").strip().splitlines()[0], task_names.options(cls))
    shared = ", ".join(sorted(set(task_names.ATTRIBUTES) - {"batch_size"}))
    out.print(f"Every task but synthetic also has {shared}: see docs/tasks.md", style="dim", highlight=False)
    out.print("A task of your own: path/to/file.py:ClassName", style="dim")


def _print_entry(name: str, summary: str, options: list[settings.Option]) -> None:
    """In a terminal wrapped at words; elsewhere with one line for each option, for other programs."""
    wrapped = out.is_terminal
    out.print(f"[bold]{name}[/bold]  {summary}", highlight=False, soft_wrap=not wrapped)
    for option in options:
        line = f"  {option.name} = {option.default}  ({option.type})"
        if wrapped:
            out.print(line, highlight=False, markup=False, soft_wrap=False)
            out.print(Padding(Text(option.doc), (0, 0, 0, 6)), soft_wrap=False)
        else:
            out.print(f"{line}  {option.doc}".rstrip(), highlight=False, markup=False)
