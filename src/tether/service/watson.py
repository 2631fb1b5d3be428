"""The v1 interface, as IBM's clients know it."""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from tether.service import asked, openapi
from tether.service.body import contents, read_body, read_json, read_parts
from tether.service.core import Core, address
from tether.service.problems import Problem, not_found
from tether.service.table import read_table


def routes(core: Core) -> APIRouter:
    """The paths below /v1, and that of IBM's identity service."""
    settings, store, jobs = core.settings, core.store, core.jobs
    router = APIRouter()
    upload, question = openapi.upload(settings), openapi.text(settings)

    @router.post("/v1/classifiers", **openapi.described(openapi.CLASSIFIER, upload, links=openapi.LINKS))
    async def create(request: Request) -> dict[str, Any]:
        """Train a classifier from `training_metadata` (JSON) and `training_data` (CSV)."""
        owner = core.caller(request)
        names = "training_metadata", "training_data"
        parts = await read_parts(request, names, settings.body_bytes_max, settings.body_seconds_max)

        def store_it() -> dict[str, Any]:
            about = asked.metadata(parts.get("training_metadata"))
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
                    **about._asdict(),
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

        async with core.checks:
            return core.shown(request, await run_in_threadpool(store_it))

    @router.get("/v1/classifiers", **openapi.described(openapi.CLASSIFIERS))
    def listed(request: Request) -> dict[str, Any]:
        """All classifiers of the caller."""
        return {"classifiers": [core.shown(request, row) for row in store.classifiers(core.caller(request))]}

    @router.get("/v1/classifiers/{classifier_id}", **openapi.described(openapi.CLASSIFIER))
    def status(request: Request, classifier_id: str) -> dict[str, Any]:
        """One classifier and its status. Here and in classify, a name stands for its current version."""
        return core.shown(request, core.owned(request, classifier_id))

    @router.delete("/v1/classifiers/{classifier_id}", **openapi.described(openapi.NOTHING))
    def delete(request: Request, classifier_id: str) -> dict[str, Any]:
        """Delete a classifier with its data and model."""
        row = core.owned(request, classifier_id)
        if row["id"] != classifier_id:
            raise not_found()
        store.remove(row["owner"], classifier_id)
        jobs.remove(classifier_id)
        core.models.drop(classifier_id)
        return {}

    def answer(
        request: Request, owner: str, classifier_id: str, texts: list[str]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        row = store.get(owner, classifier_id)
        _, found = core.answers(row, texts, asked.out_of_scope(request))
        about = core.shown(request, row)
        return {"classifier_id": about["classifier_id"], "url": about["url"]}, found

    async def one(request: Request, owner: str, classifier_id: str, text: Any) -> dict[str, Any]:
        about, [found] = await run_in_threadpool(answer, request, owner, classifier_id, [asked.text(text, settings)])
        return {**about, **found}

    @router.post(
        "/v1/classifiers/{classifier_id}/classify",
        **openapi.described(openapi.CLASSIFICATION, openapi.body(question), openapi.SCOPE),
    )
    async def classify(request: Request, classifier_id: str) -> dict[str, Any]:
        """Classify `{"text"}`: the ten most likely classes, descending."""
        owner = core.caller(request)
        body = await read_json(request, settings.json_bytes_max)
        return await one(request, owner, classifier_id, body.get("text") if isinstance(body, dict) else None)

    @router.get(
        "/v1/classifiers/{classifier_id}/classify",
        **openapi.described(
            openapi.CLASSIFICATION,
            None,
            openapi.query("text", question["properties"]["text"], "what to classify", required=True),
            openapi.SCOPE,
        ),
    )
    async def classify_query(request: Request, classifier_id: str) -> dict[str, Any]:
        """Classify the query's `text`."""
        return await one(request, core.caller(request), classifier_id, request.query_params.get("text"))

    @router.post(
        "/v1/classifiers/{classifier_id}/classify_collection",
        **openapi.described(
            openapi.COLLECTION, openapi.body(openapi.texts(settings, settings.collection_max)), openapi.SCOPE
        ),
    )
    async def classify_collection(request: Request, classifier_id: str) -> dict[str, Any]:
        """Classify `{"collection": [{"text"}]}`, at most 30 texts."""
        owner = core.caller(request)
        texts = asked.collection(await read_json(request, settings.json_bytes_max), settings, settings.collection_max)
        about, found = await run_in_threadpool(answer, request, owner, classifier_id, texts)
        return {**about, "collection": found}

    @router.post("/identity/token", **openapi.described(openapi.TOKEN, openapi.GRANT, open_to_all=True))
    async def token(request: Request) -> dict[str, Any]:
        """A token for `apikey`, as IBM's identity service gives it."""
        form = parse_qs((await read_body(request, 2**16)).decode("utf-8", "replace"), keep_blank_values=True)
        if form.get("grant_type") != ["urn:ibm:params:oauth:grant-type:apikey"]:
            raise Problem(400, "grant_type must be urn:ibm:params:oauth:grant-type:apikey")
        if "apikey" not in form:
            raise Problem(400, "Missing apikey")
        return core.access.token(form["apikey"][0], address(request))

    return router
