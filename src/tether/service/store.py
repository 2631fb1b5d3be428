"""What the service remembers: keys, classifiers, which version answers under a name, and usage.

Every function that is given an owner finds only what belongs to that owner.
"""

from __future__ import annotations

import datetime
import json
import secrets
import time
from collections import Counter
from threading import Lock
from typing import Any

from tether.service.database import Database
from tether.service.problems import Problem, not_found

TRAINING, AVAILABLE, FAILED = "Training", "Available", "Failed"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, digest TEXT NOT NULL, created TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS classifiers (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, language TEXT NOT NULL, version INTEGER NOT NULL,
    created TEXT NOT NULL, status TEXT NOT NULL, description TEXT NOT NULL, row_count INTEGER NOT NULL,
    class_count INTEGER NOT NULL, out_of_scope INTEGER NOT NULL, bytes BIGINT NOT NULL,
    number BIGINT NOT NULL, attempts INTEGER NOT NULL,
    figures TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS classifiers_of_owner ON classifiers (owner, name);
CREATE TABLE IF NOT EXISTS names (
    owner TEXT NOT NULL, name TEXT NOT NULL, classifier TEXT NOT NULL, PRIMARY KEY (owner, name)
);
CREATE TABLE IF NOT EXISTS usage (
    owner TEXT NOT NULL, day TEXT NOT NULL, kind TEXT NOT NULL, count BIGINT NOT NULL, PRIMARY KEY (owner, day, kind)
)
"""


def timestamp() -> str:
    """Now, as the interface writes it."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond // 1000:03d}Z"


class Store:
    """The tables, and the statements on them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._usage: Counter[tuple[str, str, str]] = Counter()
        self._usage_lock = Lock()
        for statement in _SCHEMA.split(";"):
            database.query(statement)

    def secret(self, name: str) -> str:
        """A random text that stays the same for ever."""
        with self._database.transaction():
            self._database.query(
                "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING", name, secrets.token_hex(32)
            )
        value: str = self._database.query("SELECT value FROM meta WHERE name = ?", name)[0]["value"]
        return value

    # ---- keys -------------------------------------------------------------------------------------------------------

    def add_key(self, key_id: str, owner: str, name: str, digest: str) -> dict[str, Any]:
        created = timestamp()
        with self._database.transaction():
            self._database.query("INSERT INTO keys VALUES (?, ?, ?, ?, ?)", key_id, owner, name, digest, created)
        return {"id": key_id, "name": name, "created": created}

    def keys(self, owner: str | None = None) -> list[dict[str, Any]]:
        """The keys of an owner, or all."""
        if owner is None:
            return self._database.query("SELECT * FROM keys ORDER BY created, id")
        return self._database.query("SELECT * FROM keys WHERE owner = ? ORDER BY created, id", owner)

    def key(self, key_id: str) -> dict[str, Any] | None:
        """A key of any owner."""
        found = self._database.query("SELECT * FROM keys WHERE id = ?", key_id)
        return found[0] if found else None

    def remove_key(self, owner: str, key_id: str) -> None:
        with self._database.transaction():
            found = self._database.query("DELETE FROM keys WHERE owner = ? AND id = ? RETURNING id", owner, key_id)
        if not found:
            raise not_found("Key not found.")

    # ---- classifiers ------------------------------------------------------------------------------------------------

    def add(self, owner: str, classifier_id: str, *, limits: tuple[int, int, int], **about: Any) -> dict[str, Any]:
        """Add a classifier that waits for its training.

        `limits` are those of the owner's classifiers, waiting trainings and bytes; 400 or 429 beyond them.
        """
        classifiers_max, queue_max, bytes_max = limits
        with self._database.transaction():
            have = self._database.query(
                "SELECT COUNT(*) AS classifiers, COALESCE(SUM(bytes), 0) AS bytes, "
                "COALESCE(SUM(CASE WHEN status = ? THEN 1 ELSE 0 END), 0) AS waiting FROM classifiers WHERE owner = ?",
                TRAINING,
                owner,
            )[0]
            if have["classifiers"] >= classifiers_max:
                raise Problem(400, f"Too many classifiers: at most {classifiers_max} are allowed; delete one first")
            if have["bytes"] + about["bytes"] > bytes_max:
                raise Problem(400, "Storage is full: delete classifiers first")
            if have["waiting"] >= queue_max:
                raise Problem(429, "Too many trainings are waiting: try again later", retry_after=30)
            latest = self._database.query(
                "SELECT COALESCE(MAX(version), 0) AS version FROM classifiers WHERE owner = ? AND name = ?",
                owner,
                about["name"],
            )[0]["version"]
            row = {
                "id": classifier_id,
                "owner": owner,
                **about,
                "out_of_scope": int(about.get("out_of_scope", False)),
                "version": latest + 1,
                "created": timestamp(),
                "status": TRAINING,
                "description": "",
                "number": time.time_ns(),
                "attempts": 0,
                "figures": "{}",
            }
            self._database.query(
                f"INSERT INTO classifiers ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", *row.values()
            )
        return _opened(row)

    def get(self, owner: str, classifier_id: str) -> dict[str, Any]:
        """A classifier by its id or, failing that, the version that answers under a name; 404 if there is neither."""
        found = self._database.query("SELECT * FROM classifiers WHERE id = ? AND owner = ?", classifier_id, owner)
        if not found:
            found = self._database.query(
                "SELECT c.* FROM classifiers c JOIN names n ON n.classifier = c.id AND n.owner = c.owner "
                "WHERE n.owner = ? AND n.name = ?",
                owner,
                classifier_id,
            )
        if not found:
            raise not_found()
        return _opened(found[0])

    def classifiers(self, owner: str) -> list[dict[str, Any]]:
        found = self._database.query("SELECT * FROM classifiers WHERE owner = ? ORDER BY number", owner)
        return [_opened(row) for row in found]

    def unfinished(self) -> list[dict[str, Any]]:
        """Trainings that wait or ran when the service ended, in the order in which they were asked for."""
        rows = self._database.query("SELECT * FROM classifiers WHERE status = ? ORDER BY number", TRAINING)
        return [_opened(row) for row in rows]

    def ids(self) -> set[str]:
        return {row["id"] for row in self._database.query("SELECT id FROM classifiers")}

    def count_crash(self, classifier_id: str) -> int:
        """Count that a training ended without a result; how often it did, 0 if the classifier is gone."""
        with self._database.transaction():
            found = self._database.query(
                "UPDATE classifiers SET attempts = attempts + 1 WHERE id = ? AND status = ? RETURNING attempts",
                classifier_id,
                TRAINING,
            )
        return int(found[0]["attempts"]) if found else 0

    def finish(self, classifier_id: str, status: str, description: str, figures: dict[str, Any]) -> None:
        """A training has ended; an available one answers under its name from now on. Nothing if it is gone."""
        with self._database.transaction():
            found = self._database.query(
                "UPDATE classifiers SET status = ?, description = ?, figures = ? WHERE id = ? AND status = ? "
                "RETURNING owner, name",
                status,
                description,
                json.dumps(figures),
                classifier_id,
                TRAINING,
            )
            if found and found[0]["name"] and status == AVAILABLE:
                self._point(found[0]["owner"], found[0]["name"], classifier_id)

    def retry(self, owner: str, classifier_id: str) -> dict[str, Any]:
        """Queue a training that has failed once more."""
        with self._database.transaction():
            found = self._database.query(
                "UPDATE classifiers SET status = ?, description = '', attempts = 0 "
                "WHERE id = ? AND owner = ? AND status = ? RETURNING *",
                TRAINING,
                classifier_id,
                owner,
                FAILED,
            )
        if not found:
            self.get(owner, classifier_id)
            raise Problem(409, "Only a training that failed or was cancelled can be tried again")
        return _opened(found[0])

    def remove(self, owner: str, classifier_id: str) -> None:
        """Delete a classifier; the newest available version of the same name answers in its place."""
        with self._database.transaction():
            found = self._database.query(
                "DELETE FROM classifiers WHERE id = ? AND owner = ? RETURNING name", classifier_id, owner
            )
            if not found:
                raise not_found()
            name = found[0]["name"]
            pointing = self._database.query(
                "DELETE FROM names WHERE owner = ? AND classifier = ? RETURNING name", owner, classifier_id
            )
            rest = self._database.query(
                "SELECT id FROM classifiers WHERE owner = ? AND name = ? AND status = ? ORDER BY version DESC LIMIT 1",
                owner,
                name,
                AVAILABLE,
            )
            if pointing and rest:
                self._point(owner, name, rest[0]["id"])

    # ---- names ------------------------------------------------------------------------------------------------------

    def names(self, owner: str) -> dict[str, str]:
        """The id of the classifier that answers under each name."""
        rows = self._database.query("SELECT name, classifier FROM names WHERE owner = ? ORDER BY name", owner)
        return {row["name"]: row["classifier"] for row in rows}

    def choose(self, owner: str, name: str, classifier_id: str) -> None:
        """Have another version answer under a name."""
        with self._database.transaction():
            found = self._database.query(
                "SELECT status FROM classifiers WHERE owner = ? AND name = ? AND id = ?", owner, name, classifier_id
            )
            if not found:
                raise not_found("No version of that name has this id.")
            if found[0]["status"] != AVAILABLE:
                raise Problem(409, f"This version is not available: it is {found[0]['status']}")
            self._point(owner, name, classifier_id)

    def _point(self, owner: str, name: str, classifier_id: str) -> None:
        self._database.query(
            "INSERT INTO names (owner, name, classifier) VALUES (?, ?, ?) "
            "ON CONFLICT (owner, name) DO UPDATE SET classifier = excluded.classifier",
            owner,
            name,
            classifier_id,
        )

    # ---- usage ------------------------------------------------------------------------------------------------------

    def count(self, owner: str, kind: str, number: int = 1) -> None:
        """Count requests; they are written by `flush`."""
        day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        with self._usage_lock:
            self._usage[owner, day, kind] += number

    def flush(self) -> None:
        with self._usage_lock:
            counted, self._usage = self._usage, Counter()
        if not counted:
            return
        with self._database.transaction():
            for (owner, day, kind), number in counted.items():
                self._database.query(
                    "INSERT INTO usage (owner, day, kind, count) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (owner, day, kind) DO UPDATE SET count = usage.count + excluded.count",
                    owner,
                    day,
                    kind,
                    number,
                )

    def usage(self, owner: str) -> list[dict[str, Any]]:
        self.flush()
        return self._database.query(
            "SELECT day, kind, count FROM usage WHERE owner = ? ORDER BY day DESC, kind LIMIT 1000", owner
        )


def _opened(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "figures": json.loads(row["figures"])}
