"""The HTTP interface as one application: v1, the service's own paths, and the page."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp

from tether.service import extras, openapi, watson
from tether.service.access import Access
from tether.service.core import Core
from tether.service.door import Door, answered
from tether.service.jobs import Jobs
from tether.service.problems import Problem
from tether.service.settings import Settings
from tether.service.store import Store

_PAGE = Path(__file__).parent / "page"


def make_app(settings: Settings, store: Store, access: Access, jobs: Jobs) -> ASGIApp:
    """The application of one service."""
    core = Core(settings, store, access, jobs)
    app = FastAPI(title="Tether", version="1", docs_url=None, redoc_url=None)
    routers = watson.routes(core), extras.routes(core)
    for router in routers:
        app.include_router(router)
    app.openapi = openapi.description(app, settings.authenticate)  # type: ignore[method-assign]

    @app.exception_handler(Problem)
    async def refused(request: Request, problem: Problem) -> Response:
        return answered(problem)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        names = {404: "Not found", 405: "Method not allowed"}
        response = answered(Problem(error.status_code, names.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        if error.status_code == 405:  # the framework knows only the first route of a path
            response.headers["Allow"] = ", ".join(sorted(_methods(request.scope["path"])))
        return response

    @app.exception_handler(Exception)
    async def crashed(request: Request, error: Exception) -> Response:
        return answered(Problem(500, "Internal error; nothing was stored"))

    def _methods(path: str) -> set[str]:
        return {
            method
            for routes in (*(router.routes for router in routers), app.routes)
            for route in routes
            if getattr(route, "path_regex", None) is not None and route.path_regex.match(path)  # type: ignore[attr-defined]
            for method in route.methods or ()  # type: ignore[attr-defined]
        }

    plotly = find_spec("plotly")
    files = {"/": _PAGE / "index.html", "/page.js": _PAGE / "page.js", "/page.css": _PAGE / "page.css"}
    if plotly is not None and plotly.origin is not None:
        files["/plotly.js"] = Path(plotly.origin).parent / "package_data" / "plotly.min.js"
    for path, file in files.items():
        app.get(path, include_in_schema=False)(_serving(file))
    return Door(app, settings)


def _serving(file: Path) -> Callable[[], FileResponse]:
    def serve() -> FileResponse:
        return FileResponse(file)

    return serve
