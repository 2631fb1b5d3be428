"""Protocols, runtimes and settings, built from the arguments of the command line."""

from __future__ import annotations

from typing import Any

from tether import api, protocols, tasks
from tether.core import settings
from tether.errors import UsageError, unknown
from tether.protocols import Options
from tether.runtimes.base import Runtime


def protocol_class(name: str) -> type[Options]:
    """The options of the protocol of that name."""
    if name not in protocols.known():
        raise unknown("protocol", name, protocols.known())
    return protocols.known()[name]


def split_settings(texts: list[str], protocol: type[Options], task: str) -> tuple[dict[str, str], dict[str, str]]:
    """The protocol's settings and the task's; task.NAME is always the task's."""
    for_protocol: dict[str, str] = {}
    for_task: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise UsageError(f"--set {text!r} is not understood; write it like --set tau=10")
        if name.startswith("task."):
            for_task[name.removeprefix("task.")] = value
        elif name in settings.parameters(protocol):
            for_protocol[name] = value
        elif name in (of_task := tasks.settable(tasks.find(task))):
            for_task[name] = value
        else:
            if others := [other for other, kind in protocols.known().items() if name in settings.parameters(kind)]:
                having = f"protocol {protocol.name} has no option {name!r}; these have it: {', '.join(others)}"
                raise UsageError(f"{having}. Choose one with --protocol, or leave the option out")
            known = [*settings.parameters(protocol), *of_task]
            raise unknown(f"option of protocol {protocol.name} or task {task}", name, known)
    return for_protocol, for_task


def runtime(
    on: str,
    workers: str | None,
    master: str | None,
    protocol: Options,
    only_sim: dict[str, Any],
    only_cluster: dict[str, Any],
    device: str | None = None,
    address: str | None = None,
) -> Runtime:
    """The runtime of that name; `only_sim` and `only_cluster` are options that only these have."""
    least, most = _range(workers)
    only_cluster |= {"workers_max": most} if most is not None else {}
    if only_cluster and on in api.RUNTIMES and on != "cluster":
        raise UsageError(
            "--listen, --key, --hosts, --ssh, --no-encryption and --workers MIN:MAX: only a cluster has them; add --on "
            "cluster"
        )
    if only_sim and on in api.RUNTIMES and on != "sim":
        flags = ", ".join("--" + name.replace("_", "-") for name in only_sim)
        raise UsageError(f"{flags} works only on a simulated cluster: add --on sim")
    return api.make_runtime(on, least, master, protocol, address=address, device=device, **only_sim, **only_cluster)


def _range(workers: str | None) -> tuple[int | None, int | None]:
    """The numbers in MIN[:MAX]."""
    if workers is None:
        return None, None
    least, colon, most = workers.partition(":")
    try:
        return int(least), int(most) if colon else None
    except ValueError:
        raise UsageError(f"--workers must be a whole number, or MIN:MAX on a cluster, not {workers!r}") from None


def given(**options: Any) -> dict[str, Any]:
    """The options that the user has given."""
    return {name: value for name, value in options.items() if value is not None}
