"""`tether protocols` and `tether tasks`: what there is to choose from."""

from __future__ import annotations

from dataclasses import fields

from tether import protocols as protocol_names
from tether import tasks as task_names
from tether.cli.output import out
from tether.core import settings


def protocols() -> None:
    """List the protocols with when to take them, their options and defaults."""
    for name, cls in protocol_names.known().items():
        docs = {field.name: field.metadata.get("doc", "") for field in fields(cls)}
        _print_entry(name, f"{cls.summary}\n  for {cls.suits}", settings.options(cls, docs))
    out.print("What the choice costs, in figures: docs/protocols.md", style="dim")


def tasks() -> None:
    """List the built-in tasks with their options and defaults."""
    for name, cls in task_names.known().items():
        _print_entry(name, (cls.__doc__ or "").strip().splitlines()[0], task_names.options(cls))
    shared = ", ".join(sorted(set(task_names.ATTRIBUTES) - {"batch_size"}))
    out.print(f"Every task but synthetic also has {shared}: see docs/tasks.md", style="dim", highlight=False)
    out.print("A task of your own: path/to/file.py:ClassName", style="dim")


def _print_entry(name: str, summary: str, options: list[settings.Option]) -> None:
    out.print(f"[bold]{name}[/bold]  {summary}", highlight=False)
    for option in options:
        line = f"  {option.name} = {option.default}  ({option.type})  {option.doc}".rstrip()
        out.print(line, highlight=False, markup=False)
