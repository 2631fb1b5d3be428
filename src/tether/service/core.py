"""What both halves of the interface use: who asks, which classifier, how it is shown, and its answers."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from tether.errors import UsageError
from tether.service.access import Access
from tether.service.jobs import Jobs
from tether.service.model import Models
from tether.service.problems import Problem
from tether.service.settings import Settings
from tether.service.store import AVAILABLE, TRAINING, Store
from tether.service.training import RUN

#: the top class of a text that is like nothing that was trained on, where this is asked for
OUT_OF_SCOPE = "out_of_scope"
_DESCRIBED = {
    TRAINING: "The classifier instance is in its training phase, not yet ready to accept classify requests",
    AVAILABLE: "The classifier instance is now available and is ready to take classifier requests.",
}


class Core:
    """The parts of one service."""

    def __init__(self, settings: Settings, store: Store, access: Access, jobs: Jobs) -> None:
        self.settings, self.store, self.access, self.jobs = settings, store, access, jobs
        self.models = Models(lambda name: jobs.folder(name) / RUN, settings.encoder, settings.loaded_bytes_max)
        #: uploads that are read at the same time
        self.checks = asyncio.Semaphore(settings.checks_at_once)

    def caller(self, request: Request) -> str:
        """The owner that a request acts for; 401 or 429 if it may not."""
        return self.access.caller(request.headers, address(request))

    def owned(self, request: Request, classifier_id: str) -> dict[str, Any]:
        """The caller's classifier of this id or name; 404 if there is none."""
        return self.store.get(self.caller(request), classifier_id)

    def shown(self, request: Request, row: dict[str, Any]) -> dict[str, Any]:
        """A classifier as v1 shows it."""
        base = f"{request.url.scheme}://{request.headers.get('host', '')}{request.scope['prefix']}"
        return {
            "classifier_id": row["id"],
            "url": f"{base}/v1/classifiers/{row['id']}",
            **({"name": row["name"]} if row["name"] else {}),
            "language": row["language"],
            "created": row["created"],
            "status": row["status"],
            "status_description": row["description"] or _DESCRIBED.get(row["status"], "Training has failed"),
        }

    def answers(
        self, row: dict[str, Any], texts: list[str], out_of_scope: bool | None, *, early: bool = False
    ) -> tuple[str, list[dict[str, Any]]]:
        """Which models have answered, and what; `early` takes what there is while the classifier trains."""
        training = row["status"] == TRAINING
        try:
            model = self.models.get(row["id"]) if row["status"] == AVAILABLE or (early and training) else None
        except UsageError:
            raise Problem(
                409,
                "The classifier was trained with an encoder that the service does not have: start it with --encoder",
            ) from None
        if model is None:
            why = "is still training" if training else "has failed to train"
            raise Problem(409, f"The classifier {why}, and cannot classify")
        found: list[dict[str, Any]] = [
            {
                "text": text,
                "top_class": classes[0][0],
                "classes": [{"class_name": name, "confidence": confidence} for name, confidence in classes],
            }
            for text, classes in zip(texts, model.classify(texts), strict=True)
        ]
        if out_of_scope if out_of_scope is not None else row["out_of_scope"]:
            for answer, outside in zip(found, model.out_of_scope(texts), strict=True):
                answer["out_of_scope"] = outside
                if outside:
                    answer["top_class"] = OUT_OF_SCOPE
        self.store.count(row["owner"], "classify", len(texts))
        return model.stage, found


def address(request: Request) -> str:
    return request.client.host if request.client is not None else ""
