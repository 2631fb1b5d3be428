"""The description of the interface: what requests must look like, and what answers do.

What a pattern can say of an upload is said: a body that fits is accepted. What it leaves out, such as limits on the
number of rows, is in `asked` and `table`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from tether.service import asked
from tether.service.settings import LANGUAGES, Settings

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_MAYBE_SHARE: Schema = {"type": ["number", "null"], "minimum": 0, "maximum": 1}
_YES_OR_NO: Schema = {"type": "boolean"}
_ANY_OBJECT: Schema = {"type": "object"}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


# ---- answers --------------------------------------------------------------------------------------------------------

NOTHING = _object({})
CLASSIFIER = _object(
    {
        "classifier_id": _STRING,
        "url": _STRING,
        "language": _STRING,
        "created": {"type": "string", "format": "date-time"},
        "status": {"enum": ["Training", "Available", "Failed"]},
        "status_description": _STRING,
    },
    {"name": _STRING},
)
CLASSIFIERS = _object({"classifiers": _list(CLASSIFIER)})
CLASSIFIER_IN_FULL = _object(
    {
        **CLASSIFIER["properties"],
        "version": {"type": "integer", "minimum": 1},
        "current": _YES_OR_NO,
        "rows": _COUNT,
        "class_count": _COUNT,
        "out_of_scope": _YES_OR_NO,
        "queue_position": {"type": ["integer", "null"], "minimum": 0},
        "figures": _ANY_OBJECT,
    },
    {"progress": _list(_ANY_OBJECT)},
)
CLASSIFIER_IN_FULL["required"].remove("name")
CLASSIFIERS_IN_FULL = _object({"classifiers": _list(CLASSIFIER_IN_FULL)})
_ANSWER = _object(
    {
        "text": _STRING,
        "top_class": _STRING,
        "classes": _list(_object({"class_name": _STRING, "confidence": _SHARE})),
    },
    {"out_of_scope": _YES_OR_NO},
)
_WHICH = {"classifier_id": _STRING, "url": _STRING}
CLASSIFICATION = _object({**_WHICH, **_ANSWER["properties"]})
CLASSIFICATION["required"].remove("out_of_scope")
COLLECTION = _object({**_WHICH, "collection": _list(_ANSWER)})
BATCH = _object({"stage": {"enum": ["linear", "final"]}, "collection": _list(_ANSWER)})
TOKEN = _object(
    {
        "access_token": _STRING,
        "refresh_token": _STRING,
        "token_type": _STRING,
        "expires_in": _COUNT,
        "expiration": _COUNT,
        "scope": _STRING,
    }
)
_PAIR = _list(_object({"line": _COUNT, "first_line": _COUNT}))
REPORT = _object(
    {
        "valid": _YES_OR_NO,
        "rows": _COUNT,
        "mistake_count": _COUNT,
        "mistakes": _list(_object({"line": _COUNT, "column": _COUNT, "kind": _STRING, "message": _STRING})),
        "duplicate_count": _COUNT,
        "duplicates": _PAIR,
        "conflict_count": _COUNT,
        "conflicts": _PAIR,
        "classes": _list(_object({"class_name": _STRING, "rows": _COUNT})),
    }
)
FIGURES = _object(
    {
        "held_out_rows": _COUNT,
        "accuracy": _MAYBE_SHARE,
        "macro_f1": _MAYBE_SHARE,
        "classes": _list(
            _object({"class_name": _STRING, "precision": _SHARE, "recall": _SHARE, "f1": _SHARE, "rows": _COUNT})
        ),
        "confusion": _list(_object({"actual": _STRING, "found": _STRING, "rows": _COUNT})),
        "confidences": _list({"type": "array"}),
        "labels": _COUNT,
        "seconds": {"type": "number"},
    }
)
MISCLASSIFIED = _object(
    {
        "rows": _list(
            _object(
                {"line": _COUNT, "text": _STRING, "classes": _list(_STRING), "found": _STRING, "confidence": _SHARE}
            )
        )
    }
)
NAMED = _object({"name": _STRING, "classifier_id": _STRING})
_KEY = {"id": _STRING, "name": _STRING, "created": _STRING}
KEYS = _object({"keys": _list(_object(_KEY))})
NEW_KEY = _object({**_KEY, "key": _STRING})
USAGE = _object({"usage": _list(_object({"day": _STRING, "kind": _STRING, "count": _COUNT}))})
CSV_FILE, ZIP_FILE, EVENTS = "text/csv", "application/zip", "text/event-stream"
_ERROR = _object({"code": {"type": "integer"}, "error": _STRING}, {"description": _STRING})

# ---- requests -------------------------------------------------------------------------------------------------------

CHOICE = _object({"classifier_id": _STRING})
KEY_REQUEST = _object({}, {"name": {"type": "string", "pattern": asked.KEY_NAME.pattern}})
GRANT = {
    "required": True,
    "content": {
        "application/x-www-form-urlencoded": {
            "schema": _object(
                {"grant_type": {"const": "urn:ibm:params:oauth:grant-type:apikey"}, "apikey": _STRING},
                {"response_type": {"enum": ["cloud_iam"]}},
            )
        }
    },
}
#: anything may be checked
CSV: Schema = {"content": {CSV_FILE: {}}}

#: a value of a row begins with a sign that is not a space, and nothing in it needs an escape
_SIGN = r'[^",\\\s\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]'
_VALUE = rf"{_SIGN}(?:{_SIGN}| ){{0,199}}"
_QUOTED = rf'"{_SIGN}(?:{_SIGN}|[ ,]|""){{0,199}}"'
_ROW = rf"(?:{_VALUE}|{_QUOTED})(?:,(?:{_VALUE}|{_QUOTED})){{1,9}}"
_END = r"(?:\r\n|\r|\n)"
_TEXT = rf"(?:{_VALUE}|{_QUOTED})"
#: five rows or more, not all of the class of the first
_CLASS = "[A-Za-z0-9]{1,20}"
_SAME = r'(?:\1|"\1")'
_ONE_CLASS = rf"{_TEXT},({_CLASS})(?:{_END}{_TEXT}(?:,{_SAME})+)*{_END}?$"
_ROWS = rf"^(?!{_ONE_CLASS}){_TEXT},{_CLASS}(?:{_END}{_ROW}){{4,}}{_END}?$"


def upload(settings: Settings) -> Schema:
    """The two parts of an upload."""
    metadata = _object(
        {"language": {"enum": list(LANGUAGES)}},
        {"name": {"type": "string", "pattern": asked.NAME.pattern}, "out_of_scope": _YES_OR_NO},
    )
    rows = {
        "type": "string",
        "contentMediaType": "text/csv",
        "description": f"{settings.rows_min} to {settings.rows_max:,} rows `text,class[,class...]` without a header, "
        f"of 2 to {settings.classes_max:,} classes",
        "pattern": _ROWS,
    }
    schema = _object({"training_metadata": metadata, "training_data": rows})
    encoding = {
        "training_metadata": {"contentType": "application/json"},
        "training_data": {"contentType": "text/csv"},
    }
    return {"required": True, "content": {"multipart/form-data": {"schema": schema, "encoding": encoding}}}


def text(settings: Settings) -> Schema:
    """An object with a text."""
    return _object(
        {
            "text": {
                "type": "string",
                "minLength": 1,
                "maxLength": settings.query_characters_max,
                "pattern": asked.TEXT.pattern,
            }
        }
    )


def texts(settings: Settings, count_max: int) -> Schema:
    """An object with several texts."""
    return _object({"collection": {**_list(text(settings)), "minItems": 1, "maxItems": count_max}})


def body(schema: Schema) -> Schema:
    """A body of JSON."""
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def query(name: str, schema: Schema, description: str, *, required: bool = False) -> Schema:
    """A parameter of the query."""
    return {"name": name, "in": "query", "required": required, "schema": schema, "description": description}


SCOPE = query(
    "out_of_scope",
    {"enum": ["true", "false"]},
    "whether texts that are like nothing in the training rows get the top class out_of_scope; by default what was "
    "chosen with the upload",
)


# ---- the whole ------------------------------------------------------------------------------------------------------


def _link(operation: str, parameter: str, pointer: str) -> Schema:
    return {"operationId": operation, "parameters": {parameter: f"$response.body#/{pointer}"}}


LINKS = {
    name: _link(name, "classifier_id", "classifier_id")
    for name in (
        "status",
        "delete",
        "classify",
        "classify_query",
        "classify_collection",
        "progress",
        "events",
        "cancel",
        "stop",
        "retry",
        "figures",
        "misclassified",
        "misclassified_csv",
        "data",
        "model",
        "classify_batch",
    )
}
KEY_LINKS = {"revoke": _link("revoke", "key_id", "id")}


def described(
    answer: Schema | str,
    request: Schema | None = None,
    *parameters: Schema,
    links: dict[str, Schema] | None = None,
    open_to_all: bool = False,
) -> dict[str, Any]:
    """What a route is declared with: the schema of its answer, or the type of the file that it answers with."""
    content: dict[str, Any] = {answer: {}} if isinstance(answer, str) else {"application/json": {"schema": answer}}
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if request is not None:
        extra["requestBody"] = request
    if open_to_all:
        extra["security"] = []
    error = {"description": "an error", "content": {"application/json": {"schema": _ERROR}}}
    good: dict[str, Any] = {"description": "the answer", "content": content, **({"links": links} if links else {})}
    responses = {200: good, "default": error}
    return {
        "responses": responses,
        "openapi_extra": extra,
        "response_model": None,
        "generate_unique_id_function": lambda route: route.name,
    }


def description(app: FastAPI, authenticate: bool) -> Callable[[], dict[str, Any]]:
    """What makes the description of an application."""
    make = app.openapi

    def complete() -> dict[str, Any]:
        found = make()
        if authenticate:
            schemes = {name: {"type": "http", "scheme": name} for name in ("basic", "bearer")}
            found.setdefault("components", {})["securitySchemes"] = schemes
            found["security"] = [{name: []} for name in schemes]
        return found

    return complete
