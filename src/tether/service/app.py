"""The HTTP interface: v1 as IBM's clients know it, and the service's own additions under /api."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import secrets
import zipfile
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tether.execution.checkpoint import replacing
from tether.service.access import Access
from tether.service.body import Spool, contents, read_body, read_file, read_json, read_parts
from tether.service.jobs import Jobs
from tether.service.model import Model
from tether.service.problems import Problem, not_found
from tether.service.settings import LANGUAGES, Settings
from tether.service.store import AVAILABLE, FAILED, TRAINING, Store
from tether.service.table import Table, read_table
from tether.service.training import DATA, RESULT, RUN
from tether.tasks.text import CLASSIFIER

_PREFIX = re.compile(
    r"^((?:/natural-language-classifier/api)?(?:/instances/[^/]+)?(?:/natural-language-classifier/api)?)(/(?:v1|identity)/.*)$"
)
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
#: how long, and in bytes how much, is still taken of the body of a request that is refused
_DRAIN_SECONDS, _DRAIN_BYTES = 10.0, 2**27
_PAGE = Path(__file__).parent / "page"
_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Door:
    """Around everything: what clients put before /v1, headers of every answer, and requests of other sites."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        transaction = secrets.token_hex(16)
        headers = dict(scope["headers"])
        body_ended = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers

        async def take() -> Message:
            nonlocal body_ended
            message = await receive()
            body_ended = body_ended or not message.get("more_body", False)
            return message

        async def drain() -> None:
            """A client that is still sending would see its connection reset instead of the answer."""
            taken = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    while not body_ended and taken < _DRAIN_BYTES:
                        taken += len((await take()).get("body", b""))

        scope["prefix"] = ""
        if (found := _PREFIX.match(scope["path"])) is not None:
            scope["prefix"] = found[1]
            scope["path"] = found[2]
            scope["raw_path"] = found[2].encode()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                await drain()
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in _SECURITY.items()),
                    (b"x-global-transaction-id", transaction.encode()),
                ]
            await send(message)

        try:
            self._check_site(Request(scope))
        except Problem as problem:
            return await _answer_problem(problem)(scope, take, answer)
        await self._app(scope, take, answer)

    def _check_site(self, request: Request) -> None:
        """Another site's page must not act here with the rights of whoever looks at it."""
        host = request.headers.get("host", "")
        if not self._settings.authenticate and re.sub(r":\d+$", "", host) not in _LOOPBACK:
            raise Problem(403, "Without keys the service answers only to a local name, such as localhost")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise Problem(403, "Requests of other sites are refused")
        if request.headers.get("sec-fetch-site") == "cross-site" and request.method != "GET":
            raise Problem(403, "Requests of other sites are refused")


class Models:
    """The classifiers that answered most recently, in memory."""

    def __init__(self, jobs: Jobs, bytes_max: int) -> None:
        self._jobs = jobs
        self._bytes_max = bytes_max
        self._lock, self._loading = Lock(), Lock()
        self._loaded: OrderedDict[str, Model] = OrderedDict()

    def get(self, classifier_id: str) -> Model:
        model = self._find(classifier_id)
        if model is not None:
            return model
        with self._loading:  # one at a time, and each only once
            model = self._find(classifier_id)
            if model is not None:
                return model
            model = Model(self._jobs.folder(classifier_id) / RUN)
            with self._lock:
                self._loaded[classifier_id] = model
                while (
                    len(self._loaded) > 1 and sum(one.memory_bytes for one in self._loaded.values()) > self._bytes_max
                ):
                    self._loaded.popitem(last=False)
        return model

    def _find(self, classifier_id: str) -> Model | None:
        with self._lock:
            if classifier_id in self._loaded:
                self._loaded.move_to_end(classifier_id)
            return self._loaded.get(classifier_id)

    def drop(self, classifier_id: str) -> None:
        with self._lock:
            self._loaded.pop(classifier_id, None)


def _answer_problem(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.body(), problem.code, problem.headers)


def make_app(settings: Settings, store: Store, access: Access, jobs: Jobs) -> ASGIApp:
    """The application of one service."""
    models = Models(jobs, settings.loaded_bytes_max)
    checks = asyncio.Semaphore(settings.checks_at_once)
    streams: Counter[str] = Counter()
    app = FastAPI(title="Tether", version="1", docs_url=None, redoc_url=None)
    any_error: dict[int | str, dict[str, Any]] = {"default": {"description": "an error: code, error and description"}}

    @app.exception_handler(Problem)
    async def refused(request: Request, problem: Problem) -> Response:
        return _answer_problem(problem)

    @app.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> Response:
        names = {404: "Not found", 405: "Method not allowed"}
        response = _answer_problem(Problem(error.status_code, names.get(error.status_code, str(error.detail))))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def crashed(request: Request, error: Exception) -> Response:
        return _answer_problem(Problem(500, "Internal error; nothing was stored"))

    def caller(request: Request) -> str:
        address = request.client.host if request.client is not None else ""
        return access.caller(request.headers, address)

    def shown(request: Request, row: dict[str, Any]) -> dict[str, Any]:
        base = f"{request.url.scheme}://{request.headers.get('host', '')}{request.scope['prefix']}"
        described = {
            TRAINING: "The classifier instance is in its training phase, not yet ready to accept classify requests",
            AVAILABLE: "The classifier instance is now available and is ready to take classifier requests.",
        }
        return {
            "classifier_id": row["id"],
            "url": f"{base}/v1/classifiers/{row['id']}",
            **({"name": row["name"]} if row["name"] else {}),
            "language": row["language"],
            "created": row["created"],
            "status": row["status"],
            "status_description": row["description"] or described.get(row["status"], "Training has failed"),
        }

    def full(request: Request, row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        return {
            **shown(request, row),
            "version": row["version"],
            "current": names.get(row["name"]) == row["id"],
            "rows": row["row_count"],
            "class_count": row["class_count"],
            "queue_position": jobs.position(row["id"]),
            "figures": row["figures"],
        }

    def get(path: str, **more: Any) -> Callable[..., Any]:
        return app.get(path, responses=any_error, **more)

    def post(path: str, body: str = "application/json", **more: Any) -> Callable[..., Any]:
        schema = {"requestBody": {"content": {body: {"schema": {"type": "object"}}}}} if body else None
        return app.post(path, responses=any_error, openapi_extra=schema, **more)

    # ---- v1 ---------------------------------------------------------------------------------------------------------

    @post("/v1/classifiers", "multipart/form-data")
    async def create(request: Request) -> dict[str, Any]:
        """Train a classifier from `training_metadata` (JSON) and `training_data` (CSV)."""
        owner = caller(request)
        parts = await read_parts(request, settings.body_bytes_max, settings.body_seconds_max)

        def store_it() -> dict[str, Any]:
            name, language = _metadata(parts.get("training_metadata"))
            if "training_data" not in parts:
                raise Problem(400, "Missing data: send the part training_data with the rows as CSV")
            data = contents(parts["training_data"])
            table = read_table(data, settings)
            table.check()
            classifier_id = f"{secrets.token_hex(5)}-nlc-{secrets.randbelow(10_000):04d}"
            limits = settings.classifiers_max, settings.queue_max, settings.storage_bytes_max
            try:
                jobs.prepare(classifier_id, data, table.rows)
                row = store.add(
                    owner,
                    classifier_id,
                    limits=limits,
                    name=name,
                    language=language,
                    row_count=len(table.rows),
                    class_count=len(table.classes),
                    bytes=len(data),
                )
            except BaseException:
                jobs.remove(classifier_id)
                raise
            jobs.enqueue(classifier_id)
            store.count(owner, "create")
            return row

        async with checks:
            return shown(request, await run_in_threadpool(store_it))

    @get("/v1/classifiers")
    def listed(request: Request) -> dict[str, Any]:
        """All classifiers of the caller."""
        return {"classifiers": [shown(request, row) for row in store.classifiers(caller(request))]}

    @get("/v1/classifiers/{classifier_id}")
    def status(request: Request, classifier_id: str) -> dict[str, Any]:
        """One classifier and its status. Here and in classify, a name stands for its current version."""
        return shown(request, store.get(caller(request), classifier_id))

    @app.delete("/v1/classifiers/{classifier_id}", responses=any_error)
    def delete(request: Request, classifier_id: str) -> dict[str, Any]:
        """Delete a classifier with its data and model."""
        owner = caller(request)
        row = store.get(owner, classifier_id)
        if row["id"] != classifier_id:
            raise not_found()
        store.remove(owner, classifier_id)
        jobs.remove(classifier_id)
        models.drop(classifier_id)
        return {}

    def answer(owner: str, classifier_id: str, texts: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        row = store.get(owner, classifier_id)
        if row["status"] != AVAILABLE:
            why = "is still training" if row["status"] == TRAINING else "has failed to train"
            raise Problem(409, f"The classifier {why}, and cannot classify")
        found = models.get(row["id"]).classify(texts) if texts else []
        store.count(owner, "classify", len(texts))
        return row, [
            {
                "text": text,
                "top_class": classes[0][0],
                "classes": [{"class_name": name, "confidence": confidence} for name, confidence in classes],
            }
            for text, classes in zip(texts, found, strict=True)
        ]

    async def one(request: Request, owner: str, classifier_id: str, text: Any) -> dict[str, Any]:
        row, [found] = await run_in_threadpool(answer, owner, classifier_id, [_text(text, settings)])
        about = shown(request, row)
        return {"classifier_id": about["classifier_id"], "url": about["url"], **found}

    @post("/v1/classifiers/{classifier_id}/classify")
    async def classify(request: Request, classifier_id: str) -> dict[str, Any]:
        """Classify `{"text"}`: the ten most likely classes, descending."""
        owner = caller(request)
        body = await read_json(request, settings.json_bytes_max)
        return await one(request, owner, classifier_id, body.get("text") if isinstance(body, dict) else None)

    @get("/v1/classifiers/{classifier_id}/classify")
    async def classify_query(request: Request, classifier_id: str) -> dict[str, Any]:
        """Classify the query's `text`."""
        return await one(request, caller(request), classifier_id, request.query_params.get("text"))

    @post("/v1/classifiers/{classifier_id}/classify_collection")
    async def classify_collection(request: Request, classifier_id: str) -> dict[str, Any]:
        """Classify `{"collection": [{"text"}]}`, at most 30 texts."""
        owner = caller(request)
        texts = _collection(await read_json(request, settings.json_bytes_max), settings, settings.collection_max)
        row, found = await run_in_threadpool(answer, owner, classifier_id, texts)
        about = shown(request, row)
        return {"classifier_id": about["classifier_id"], "url": about["url"], "collection": found}

    @post("/identity/token", "application/x-www-form-urlencoded")
    async def token(request: Request) -> dict[str, Any]:
        """A token for `apikey`, as IBM's identity service gives it."""
        form = parse_qs((await read_body(request, 2**16)).decode("utf-8", "replace"))
        if form.get("grant_type") != ["urn:ibm:params:oauth:grant-type:apikey"]:
            raise Problem(400, "grant_type must be urn:ibm:params:oauth:grant-type:apikey")
        return access.token(form.get("apikey", [""])[0], request.client.host if request.client else "")

    # ---- the service's own ------------------------------------------------------------------------------------------

    @post("/api/validate", "text/csv")
    async def validate(request: Request) -> dict[str, Any]:
        """Check a CSV without training: every mistake with line and column, duplicates, rows of each class."""
        caller(request)
        file = await read_file(request, settings.body_bytes_max, settings.body_seconds_max)
        async with checks:
            return _report(await run_in_threadpool(lambda: read_table(contents(file), settings)))

    @get("/api/classifiers")
    def all_classifiers(request: Request) -> dict[str, Any]:
        """All classifiers with version, queue position and figures."""
        owner = caller(request)
        names = store.names(owner)
        return {"classifiers": [full(request, row, names) for row in store.classifiers(owner)]}

    def owned(request: Request, classifier_id: str) -> dict[str, Any]:
        return store.get(caller(request), classifier_id)

    @get("/api/classifiers/{classifier_id}")
    def progress(request: Request, classifier_id: str) -> dict[str, Any]:
        """One classifier, and all evaluations of its training."""
        row = owned(request, classifier_id)
        return {**full(request, row, store.names(row["owner"])), "progress": jobs.progress(row["id"])}

    @get("/api/classifiers/{classifier_id}/events", response_class=StreamingResponse)
    async def events(request: Request, classifier_id: str) -> Response:
        """Server-sent events: `progress` for each evaluation, `status` at each change, until training has ended."""
        row = await run_in_threadpool(owned, request, classifier_id)
        owner = row["owner"]
        if streams[owner] >= settings.streams_max:
            raise Problem(429, f"Too many event streams: at most {settings.streams_max} are allowed", retry_after=5)

        async def counted() -> AsyncIterator[str]:
            streams[owner] += 1
            try:
                async for event in _events(owner, row["id"], store, jobs):
                    yield event
            finally:
                streams[owner] -= 1

        return StreamingResponse(counted(), media_type="text/event-stream")

    @post("/api/classifiers/{classifier_id}/cancel", "")
    def cancel(request: Request, classifier_id: str) -> dict[str, Any]:
        """End a training and keep nothing of it."""
        row = owned(request, classifier_id)
        if row["status"] != TRAINING:
            raise Problem(409, "The training has ended already")
        jobs.cancel(row["id"])
        return shown(request, store.get(row["owner"], row["id"]))

    @post("/api/classifiers/{classifier_id}/stop", "")
    def stop(request: Request, classifier_id: str) -> dict[str, Any]:
        """End a training with the best model so far."""
        row = owned(request, classifier_id)
        if not jobs.stop(row["id"]):
            raise Problem(409, "The training is not running")
        return shown(request, row)

    @post("/api/classifiers/{classifier_id}/retry", "")
    def retry(request: Request, classifier_id: str) -> dict[str, Any]:
        """Train once more what has failed or was cancelled."""
        row = store.retry(caller(request), classifier_id)
        jobs.enqueue(row["id"])
        return shown(request, row)

    def result(request: Request, classifier_id: str) -> dict[str, Any]:
        row = owned(request, classifier_id)
        if row["status"] != AVAILABLE:
            raise Problem(409, "There are figures once the classifier is available")
        figures: dict[str, Any] = json.loads((jobs.folder(row["id"]) / RESULT).read_text())["figures"]
        return figures

    @get("/api/classifiers/{classifier_id}/figures")
    def figures(request: Request, classifier_id: str) -> dict[str, Any]:
        """Accuracy, macro-F1, figures of each class and the confusion matrix, on rows that were held out."""
        found = result(request, classifier_id)
        del found["misclassified"]
        return found

    @get("/api/classifiers/{classifier_id}/misclassified")
    def misclassified(request: Request, classifier_id: str) -> dict[str, Any]:
        """Held-out rows that were classified wrongly; `actual` and `found` in the query choose some."""
        chosen = [
            row
            for row in result(request, classifier_id)["misclassified"]
            if request.query_params.get("actual") in (None, row["classes"][0])
            and request.query_params.get("found") in (None, row["found"])
        ]
        return {"rows": chosen}

    @get("/api/classifiers/{classifier_id}/misclassified.csv", response_class=Response)
    def misclassified_csv(request: Request, classifier_id: str) -> Response:
        """The same as CSV; values that a spreadsheet would take for a formula begin with a quote."""
        file = io.StringIO(newline="")
        writer = csv.writer(file)
        writer.writerow(["line", "text", "classes", "found", "confidence"])
        for row in result(request, classifier_id)["misclassified"]:
            values = (row["line"], row["text"], "; ".join(row["classes"]), row["found"], row["confidence"])
            writer.writerow([_harmless(value) for value in values])
        return _attachment(file.getvalue().encode(), "text/csv; charset=utf-8", "misclassified.csv")

    @get("/api/classifiers/{classifier_id}/data", response_class=FileResponse)
    def data(request: Request, classifier_id: str) -> Response:
        """The CSV as it was uploaded."""
        row = owned(request, classifier_id)
        return FileResponse(jobs.folder(row["id"]) / DATA, media_type="text/csv", filename=f"{row['id']}.csv")

    @get("/api/classifiers/{classifier_id}/model", response_class=FileResponse)
    def model(request: Request, classifier_id: str) -> Response:
        """The model as a zip of safetensors and JSON; unzipped, `tether classify FOLDER TEXT` uses it."""
        row = owned(request, classifier_id)
        if row["status"] != AVAILABLE:
            raise Problem(409, "There is a model once the classifier is available")
        about = {name: row[name] for name in ("name", "version", "language", "created", "figures")}
        file = _zipped(jobs.folder(row["id"]), row["id"], {"classifier_id": row["id"], **about})
        return FileResponse(file, media_type="application/zip", filename=f"{row['id']}.zip")

    @post("/api/classifiers/{classifier_id}/classify_batch")
    async def classify_batch(request: Request, classifier_id: str) -> dict[str, Any]:
        """As classify_collection, with up to 1,000 texts."""
        owner = caller(request)
        texts = _collection(await read_json(request, settings.batch_bytes_max), settings, settings.batch_max)
        _, found = await run_in_threadpool(answer, owner, classifier_id, texts)
        return {"collection": found}

    @app.put("/api/names/{name}", responses=any_error)
    async def choose(request: Request, name: str) -> dict[str, Any]:
        """Have the version `{"classifier_id"}` answer under a name: forward or back."""
        owner = caller(request)
        body = await read_json(request, settings.json_bytes_max)
        if not isinstance(body, dict) or not _is_unicode(body.get("classifier_id")):
            raise Problem(400, "Expected classifier_id")
        await run_in_threadpool(store.choose, owner, name, body["classifier_id"])
        return {"name": name, "classifier_id": body["classifier_id"]}

    @get("/api/keys")
    def keys(request: Request) -> dict[str, Any]:
        """The caller's keys, without their secrets."""
        found = store.keys(caller(request))
        return {"keys": [{name: key[name] for name in ("id", "name", "created")} for key in found]}

    @post("/api/keys")
    async def make_key(request: Request) -> dict[str, Any]:
        """A new key for the caller's classifiers, which is shown this once."""
        owner = caller(request)
        body = await read_json(request, settings.json_bytes_max)
        name = body.get("name", "") if isinstance(body, dict) else None
        if not isinstance(name, str) or len(name) > 100 or "\0" in name or not _is_unicode(name):
            raise Problem(400, "name must be a text of at most 100 characters")
        if len(store.keys(owner)) >= 100:
            raise Problem(400, "There are 100 keys: revoke one first")
        key, record = await run_in_threadpool(access.make_key, owner, name)
        return {**record, "key": key}

    @app.delete("/api/keys/{key_id}", responses=any_error)
    def revoke(request: Request, key_id: str) -> dict[str, Any]:
        """Revoke a key; tokens made from it end too."""
        access.revoke(caller(request), key_id)
        return {}

    @get("/api/usage")
    def usage(request: Request) -> dict[str, Any]:
        """Trainings and classified texts of each day."""
        return {"usage": store.usage(caller(request))}

    @get("/api/service", include_in_schema=False)
    def about() -> dict[str, Any]:
        return {"authenticate": settings.authenticate, "languages": LANGUAGES}

    # ---- the page ---------------------------------------------------------------------------------------------------

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


async def _events(owner: str, classifier_id: str, store: Store, jobs: Jobs) -> AsyncIterator[str]:
    sent, last = 0, ""
    while True:
        try:
            row = await run_in_threadpool(store.get, owner, classifier_id)
        except Problem:
            return
        for line in await run_in_threadpool(jobs.progress, classifier_id, sent):
            sent += 1
            yield f"event: progress\ndata: {json.dumps(line)}\n\n"
        state = {
            "status": row["status"],
            "status_description": row["description"],
            "queue_position": jobs.position(classifier_id),
        }
        if json.dumps(state) != last:
            last = json.dumps(state)
            yield f"event: status\ndata: {last}\n\n"
        if row["status"] in (AVAILABLE, FAILED):
            return
        await asyncio.sleep(0.25)


def _metadata(part: Spool | None) -> tuple[str, str]:
    """Name and language; some clients wrap their JSON in an object with `data`."""
    if part is None:
        raise Problem(400, "Missing metadata: send the part training_metadata")
    try:
        found = json.loads(contents(part).decode("utf-8-sig"))
        if isinstance(found, dict) and isinstance(found.get("data"), str) and "language" not in found:
            found = json.loads(found["data"])
    except (ValueError, RecursionError):
        raise Problem(400, "Malformed metadata: training_metadata is not JSON") from None
    if not isinstance(found, dict) or "language" not in found:
        raise Problem(400, 'Missing metadata: training_metadata must be {"language": "en", "name": "..."}')
    language, name = found["language"], found.get("name") or ""
    if not isinstance(language, str) or language.partition("-")[0].lower() not in LANGUAGES:
        raise Problem(400, f"Malformed metadata: language must be one of {', '.join(LANGUAGES)}")
    if not isinstance(name, str) or len(name) > 200 or not name.isprintable():
        raise Problem(400, "Malformed metadata: name must be a text of at most 200 characters")
    return name, language


def _text(text: Any, settings: Settings) -> str:
    if not isinstance(text, str) or not text.strip():
        raise Problem(400, "Missing text: expected a text that is not empty")
    if len(text) > settings.query_characters_max:
        raise Problem(400, f"Phrase too long: {len(text):,} characters; at most {settings.query_characters_max:,}")
    if not _is_unicode(text):
        raise Problem(400, "The text has half of a surrogate pair, which is not Unicode")
    return text


def _is_unicode(text: Any) -> bool:
    """Whether it is a text without halves of surrogate pairs, which JSON can have."""
    return isinstance(text, str) and not any("\ud800" <= character <= "\udfff" for character in text)


def _collection(body: Any, settings: Settings, count_max: int) -> list[str]:
    """The texts of a collection; an item may be JSON in a string, as in IBM's example."""
    items = body.get("collection") if isinstance(body, dict) else None
    if not isinstance(items, list) or not 1 <= len(items) <= count_max:
        raise Problem(400, f"Expected collection: a list of 1 to {count_max:,} objects with text")
    texts = []
    for item in items:
        if isinstance(item, str):
            try:
                item = json.loads(item)
            except (ValueError, RecursionError):
                raise Problem(400, "Expected collection: an item is a string that is not JSON") from None
        texts.append(_text(item.get("text") if isinstance(item, dict) else None, settings))
    return texts


def _report(table: Table) -> dict[str, Any]:
    return {
        "valid": not table.mistake_count,
        "rows": len(table.rows),
        "mistake_count": table.mistake_count,
        "mistakes": [vars(mistake) for mistake in table.mistakes],
        "duplicate_count": table.duplicate_count,
        "duplicates": [{"line": line, "first_line": first} for line, first in table.duplicates],
        "conflict_count": table.conflict_count,
        "conflicts": [{"line": line, "first_line": first} for line, first in table.conflicts],
        "classes": [{"class_name": name, "rows": rows} for name, rows in table.classes.most_common()],
    }


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _attachment(content: bytes, kind: str, name: str) -> Response:
    return Response(content, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def _zipped(folder: Path, name: str, about: dict[str, Any]) -> Path:
    """What is needed to classify, packed once; a model never changes."""
    packed = folder / "model.zip"
    if not packed.exists():
        with replacing(packed) as made, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
            archive.write(folder / RUN / "task" / CLASSIFIER, f"{name}/{CLASSIFIER}")
            archive.writestr(f"{name}/about.json", json.dumps(about, indent=2))
    return packed
