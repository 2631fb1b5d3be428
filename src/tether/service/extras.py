"""What the service has beyond v1, under /api: validation, progress, figures, versions, downloads, keys and usage."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import zipfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from tether.execution.checkpoint import replacing
from tether.service import asked, openapi
from tether.service.body import contents, read_file, read_json
from tether.service.core import Core, address
from tether.service.jobs import Jobs
from tether.service.problems import Problem
from tether.service.settings import LANGUAGES
from tether.service.store import AVAILABLE, FAILED, TRAINING, Store
from tether.service.table import Table, read_table
from tether.service.training import DATA, RESULT, RUN
from tether.tasks.text import CLASSIFIER

#: between looks for new events, and how long a stream is silent at most
_EVENT_SECONDS, _SILENCE_SECONDS = 0.25, 10.0


def routes(core: Core) -> APIRouter:
    """The paths below /api."""
    settings, store, jobs = core.settings, core.store, core.jobs
    streams: Counter[str] = Counter()
    router = APIRouter()

    def full(request: Request, row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        return {
            **core.shown(request, row),
            "version": row["version"],
            "current": names.get(row["name"]) == row["id"],
            "rows": row["row_count"],
            "out_of_scope": bool(row["out_of_scope"]),
            "class_count": row["class_count"],
            "queue_position": jobs.position(row["id"]),
            "figures": row["figures"],
        }

    @router.post("/api/validate", **openapi.described(openapi.REPORT, openapi.CSV))
    async def validate(request: Request) -> dict[str, Any]:
        """Check a CSV without training: every mistake with line and column, duplicates, rows of each class."""
        core.caller(request)
        file = await read_file(request, settings.body_bytes_max, settings.body_seconds_max)
        async with core.checks:
            return _report(await run_in_threadpool(lambda: read_table(contents(file), settings)))

    @router.get("/api/classifiers", **openapi.described(openapi.CLASSIFIERS_IN_FULL))
    def all_classifiers(request: Request) -> dict[str, Any]:
        """All classifiers with version, queue position and figures."""
        owner = core.caller(request)
        names = store.names(owner)
        return {"classifiers": [full(request, row, names) for row in store.classifiers(owner)]}

    @router.get("/api/classifiers/{classifier_id}", **openapi.described(openapi.CLASSIFIER_IN_FULL))
    def progress(request: Request, classifier_id: str) -> dict[str, Any]:
        """One classifier, and all evaluations of its training."""
        row = core.owned(request, classifier_id)
        return {**full(request, row, store.names(row["owner"])), "progress": jobs.progress(row["id"])}

    @router.get(
        "/api/classifiers/{classifier_id}/events",
        response_class=StreamingResponse,
        **openapi.described(openapi.EVENTS),
    )
    async def events(request: Request, classifier_id: str) -> Response:
        """Server-sent events: `progress` for each evaluation, `status` at each change, until training has ended."""
        row = await run_in_threadpool(core.owned, request, classifier_id)
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

    @router.post("/api/classifiers/{classifier_id}/cancel", **openapi.described(openapi.CLASSIFIER))
    def cancel(request: Request, classifier_id: str) -> dict[str, Any]:
        """End a training and keep nothing of it."""
        row = core.owned(request, classifier_id)
        if row["status"] != TRAINING:
            raise Problem(409, "The training has ended already")
        jobs.cancel(row["id"])
        return core.shown(request, store.get(row["owner"], row["id"]))

    @router.post("/api/classifiers/{classifier_id}/stop", **openapi.described(openapi.CLASSIFIER))
    def stop(request: Request, classifier_id: str) -> dict[str, Any]:
        """End a training with the best model so far."""
        row = core.owned(request, classifier_id)
        if not jobs.stop(row["id"]):
            raise Problem(409, "The training is not running")
        return core.shown(request, row)

    @router.post("/api/classifiers/{classifier_id}/retry", **openapi.described(openapi.CLASSIFIER))
    def retry(request: Request, classifier_id: str) -> dict[str, Any]:
        """Train once more what has failed or was cancelled."""
        row = store.retry(core.caller(request), classifier_id)
        jobs.enqueue(row["id"])
        return core.shown(request, row)

    def result(request: Request, classifier_id: str) -> dict[str, Any]:
        row = core.owned(request, classifier_id)
        if row["status"] != AVAILABLE:
            raise Problem(409, "There are figures once the classifier is available")
        figures: dict[str, Any] = json.loads((jobs.folder(row["id"]) / RESULT).read_text())["figures"]
        return figures

    @router.get("/api/classifiers/{classifier_id}/figures", **openapi.described(openapi.FIGURES))
    def figures(request: Request, classifier_id: str) -> dict[str, Any]:
        """Accuracy, macro-F1, figures of each class and the confusion matrix, on rows that were held out."""
        found = result(request, classifier_id)
        del found["misclassified"]
        return found

    @router.get(
        "/api/classifiers/{classifier_id}/misclassified",
        **openapi.described(
            openapi.MISCLASSIFIED,
            None,
            openapi.query("actual", {"type": "string"}, "only rows of this class"),
            openapi.query("found", {"type": "string"}, "only rows that were answered with this class"),
        ),
    )
    def misclassified(request: Request, classifier_id: str) -> dict[str, Any]:
        """Held-out rows that were classified wrongly; `actual` and `found` in the query choose some."""
        chosen = [
            row
            for row in result(request, classifier_id)["misclassified"]
            if request.query_params.get("actual") in (None, row["classes"][0])
            and request.query_params.get("found") in (None, row["found"])
        ]
        return {"rows": chosen}

    @router.get(
        "/api/classifiers/{classifier_id}/misclassified.csv",
        response_class=Response,
        **openapi.described(openapi.CSV_FILE),
    )
    def misclassified_csv(request: Request, classifier_id: str) -> Response:
        """The same as CSV; values that a spreadsheet would take for a formula begin with a quote."""
        file = io.StringIO(newline="")
        writer = csv.writer(file)
        writer.writerow(["line", "text", "classes", "found", "confidence"])
        for row in result(request, classifier_id)["misclassified"]:
            values = (row["line"], row["text"], "; ".join(row["classes"]), row["found"], row["confidence"])
            writer.writerow([_harmless(value) for value in values])
        return _attachment(file.getvalue().encode(), "text/csv; charset=utf-8", "misclassified.csv")

    @router.get(
        "/api/classifiers/{classifier_id}/data",
        response_class=FileResponse,
        **openapi.described(openapi.CSV_FILE),
    )
    def data(request: Request, classifier_id: str) -> Response:
        """The CSV as it was uploaded."""
        row = core.owned(request, classifier_id)
        return FileResponse(jobs.folder(row["id"]) / DATA, media_type="text/csv", filename=f"{row['id']}.csv")

    @router.get(
        "/api/classifiers/{classifier_id}/model",
        response_class=FileResponse,
        **openapi.described(openapi.ZIP_FILE),
    )
    def model(request: Request, classifier_id: str) -> Response:
        """The model as a zip of safetensors and JSON; unzipped, `tether classify FOLDER TEXT` uses it."""
        row = core.owned(request, classifier_id)
        if row["status"] != AVAILABLE:
            raise Problem(409, "There is a model once the classifier is available")
        about = {name: row[name] for name in ("name", "version", "language", "created", "figures")}
        file = _zipped(jobs.folder(row["id"]), row["id"], {"classifier_id": row["id"], **about})
        return FileResponse(file, media_type="application/zip", filename=f"{row['id']}.zip")

    @router.post(
        "/api/classifiers/{classifier_id}/classify_batch",
        **openapi.described(openapi.BATCH, openapi.body(openapi.texts(settings, settings.batch_max)), openapi.SCOPE),
    )
    async def classify_batch(request: Request, classifier_id: str) -> dict[str, Any]:
        """As classify_collection, with up to 1,000 texts, and while the classifier trains as soon as there is a model.

        `stage` says which: `linear` is the model that is there first, `final` what training ends with.
        """
        owner = core.caller(request)
        texts = asked.collection(await read_json(request, settings.batch_bytes_max), settings, settings.batch_max)

        def answer() -> dict[str, Any]:
            row = store.get(owner, classifier_id)
            stage, found = core.answers(row, texts, asked.out_of_scope(request), early=True)
            return {"stage": stage, "collection": found}

        return await run_in_threadpool(answer)

    @router.put("/api/names/{name}", **openapi.described(openapi.NAMED, openapi.body(openapi.CHOICE)))
    async def choose(request: Request, name: str) -> dict[str, Any]:
        """Have the version `{"classifier_id"}` answer under a name: forward or back."""
        owner = core.caller(request)
        chosen = asked.classifier_id(await read_json(request, settings.json_bytes_max))
        await run_in_threadpool(store.choose, owner, name, chosen)
        return {"name": name, "classifier_id": chosen}

    @router.get("/api/keys", **openapi.described(openapi.KEYS))
    def keys(request: Request) -> dict[str, Any]:
        """The caller's keys, without their secrets."""
        found = store.keys(core.caller(request))
        return {"keys": [{name: key[name] for name in ("id", "name", "created")} for key in found]}

    @router.post(
        "/api/keys", **openapi.described(openapi.NEW_KEY, openapi.body(openapi.KEY_REQUEST), links=openapi.KEY_LINKS)
    )
    async def make_key(request: Request) -> dict[str, Any]:
        """A new key for the caller's classifiers, which is shown this once."""
        owner = core.caller(request)
        name = asked.key_name(await read_json(request, settings.json_bytes_max))
        if len(store.keys(owner)) >= 100:
            raise Problem(400, "There are 100 keys: revoke one first")
        key, record = await run_in_threadpool(core.access.make_key, owner, name)
        return {**record, "key": key}

    @router.delete("/api/keys/{key_id}", **openapi.described(openapi.NOTHING))
    def revoke(request: Request, key_id: str) -> dict[str, Any]:
        """Revoke another key than the one in use; tokens made from it end too."""
        core.access.revoke(request.headers, address(request), key_id)
        return {}

    @router.get("/api/usage", **openapi.described(openapi.USAGE))
    def usage(request: Request) -> dict[str, Any]:
        """Trainings and classified texts of each day."""
        return {"usage": store.usage(core.caller(request))}

    @router.get("/api/service", include_in_schema=False)
    def about() -> dict[str, Any]:
        return {"authenticate": settings.authenticate, "languages": LANGUAGES}

    return router


async def _events(owner: str, classifier_id: str, store: Store, jobs: Jobs) -> AsyncIterator[str]:
    sent, last, silent = 0, "", 0.0
    while True:
        before = sent, last
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
        silent = silent + _EVENT_SECONDS if (sent, last) == before else 0.0
        if silent >= _SILENCE_SECONDS:  # proxies close connections that stay silent
            silent = 0.0
            yield ": nothing new\n\n"
        await asyncio.sleep(_EVENT_SECONDS)


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
