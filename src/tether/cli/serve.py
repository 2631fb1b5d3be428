"""`tether serve`: training as a service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.output import out
from tether.errors import missing_extra


def serve(
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 is any free one.")] = 8080,
    data: Annotated[Path, typer.Option(help="The folder for uploads and models.")] = Path("tether-data"),
    database: Annotated[
        str, typer.Option(help="A PostgreSQL database, postgresql://USER@HOST/NAME; by default SQLite in --data.")
    ] = "",
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Ask users for no key. It works only on a loopback address.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="The number of trainings that run at the same time; by default half the cores."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="The number of workers in each training.")] = 2,
    encoder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The folder of a pretrained encoder in HuggingFace's layout, which all trainings use."
        ),
    ] = None,
    owner: Annotated[str, typer.Option("--add-key", help="Print a new key for this user, and exit.")] = "",
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
