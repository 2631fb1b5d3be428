"""What requests ask for, taken from their bodies and queries and checked."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from starlette.requests import Request

from tether.service.body import Spool, contents
from tether.service.problems import Problem
from tether.service.settings import LANGUAGES, Settings

#: letters, signs and spaces, but nothing that controls how a line is shown
NAME = re.compile(r"^[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]{0,200}$")
KEY_NAME = re.compile(r"^[^\x00]{0,100}$")
#: a text that has something in it
TEXT = re.compile(r"[^\s\x1c-\x1f\x85]")


class Metadata(NamedTuple):
    """What `training_metadata` says."""

    name: str
    language: str
    out_of_scope: bool


def metadata(part: Spool | None) -> Metadata:
    """Some clients wrap their JSON in an object with `data`."""
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
    language, name, out_of_scope = found["language"], found.get("name"), found.get("out_of_scope", False)
    name = "" if name is None else name
    if not isinstance(language, str) or language.partition("-")[0].lower() not in LANGUAGES:
        raise Problem(400, f"Malformed metadata: language must be one of {', '.join(LANGUAGES)}")
    if not _is_unicode(name) or NAME.fullmatch(name) is None:
        raise Problem(400, "Malformed metadata: name must be a text of at most 200 characters on one line")
    if not isinstance(out_of_scope, bool):
        raise Problem(400, "Malformed metadata: out_of_scope must be true or false")
    return Metadata(name, language, out_of_scope)


def text(found: Any, settings: Settings) -> str:
    """One text to classify."""
    if not isinstance(found, str) or TEXT.search(found) is None:
        raise Problem(400, "Missing text: expected a text that is not empty")
    if len(found) > settings.query_characters_max:
        raise Problem(400, f"Phrase too long: {len(found):,} characters; at most {settings.query_characters_max:,}")
    if not _is_unicode(found):
        raise Problem(400, "The text has half of a surrogate pair, which is not Unicode")
    return found


def collection(body: Any, settings: Settings, count_max: int) -> list[str]:
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
        texts.append(text(item.get("text") if isinstance(item, dict) else None, settings))
    return texts


def out_of_scope(request: Request) -> bool | None:
    """What the query says; None if it leaves it to the classifier."""
    given = request.query_params.get("out_of_scope")
    if given not in (None, "true", "false"):
        raise Problem(400, "out_of_scope must be true or false")
    return None if given is None else given == "true"


def classifier_id(body: Any) -> str:
    found = body.get("classifier_id") if isinstance(body, dict) else None
    if not isinstance(found, str) or not _is_unicode(found):
        raise Problem(400, "Expected classifier_id")
    return found


def key_name(body: Any) -> str:
    found = body.get("name", "") if isinstance(body, dict) else None
    if not isinstance(found, str) or not _is_unicode(found) or KEY_NAME.fullmatch(found) is None:
        raise Problem(400, "name must be a text of at most 100 characters")
    return found


def _is_unicode(found: Any) -> bool:
    """Whether it is a text without halves of surrogate pairs, which JSON can have."""
    return isinstance(found, str) and not any("\ud800" <= character <= "\udfff" for character in found)
