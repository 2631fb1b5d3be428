"""`tether serve`: training as a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.output import out
from tether.errors import missing_extra


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any that is free.")] = 8080,
    data: Annotated[Path, typer.Option(help="Where uploads and models are kept.")] = Path("tether-data"),
    database: Annotated[str, typer.Option(help="postgresql://USER@HOST/NAME instead of SQLite below --data.")] = "",
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Ask for no key; only on a loopback address.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Trainings at the same time; by default half the cores.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers of each training.")] = 2,
    encoder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A pretrained encoder in HuggingFace's layout, which trainings then use."),
    ] = None,
    owner: Annotated[str, typer.Option("--add-key", help="Only print a new key for this owner, and exit.")] = "",
) -> None:
    """Serve a page and an HTTP interface where people upload labelled texts and get a classifier."""
    try:
        from tether.service.serve import add_key
        from tether.service.serve import serve as run_service
    except ImportError as error:
        raise missing_extra(error.name or "fastapi", "serve") from None
    from tether.service.settings import Settings

    settings = Settings(
        data.resolve(),
        database,
        not no_auth,
        encoder.resolve() if encoder is not None else None,
        workers=workers,
        **({"jobs_at_once": jobs} if jobs else {}),
    )
    if owner:
        print(add_key(settings, owner))
        return

    def announce(address: str, key: str) -> None:
        out.print(f"serving on {address}", highlight=False)
        if key:
            out.print(f"key: {key}  (shown only now)", highlight=False, markup=False, soft_wrap=True)

    run_service(settings, host, port, announce)
