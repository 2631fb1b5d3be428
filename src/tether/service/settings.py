"""What the service allows: every limit, in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

#: the languages of the original service
LANGUAGES = ("en", "ar", "fr", "de", "it", "ja", "ko", "pt", "es")


@dataclass(frozen=True)
class Settings:
    """Where the service keeps its data, and what it allows."""

    data: Path
    #: a PostgreSQL URL; an SQLite file below `data` if empty
    database: str = ""
    authenticate: bool = True
    #: folder of a pretrained encoder in HuggingFace's layout, which trainings use
    encoder: Path | None = None
    #: trainings at the same time; others wait in the queue
    jobs_at_once: int = max(1, (os.cpu_count() or 1) // 2)
    #: workers of one training
    workers: int = 2
    #: trainings of one owner that wait or run
    queue_max: int = 100
    classifiers_max: int = 1000
    #: of uploads, for one owner
    storage_bytes_max: int = 20 * 2**30
    body_bytes_max: int = 100 * 2**20
    #: of requests other than uploads
    json_bytes_max: int = 2**20
    rows_min: int = 5
    rows_max: int = 20_000
    classes_max: int = 3_000
    row_classes_max: int = 100
    text_characters_max: int = 1_024
    class_characters_max: int = 1_024
    query_characters_max: int = 2_048
    collection_max: int = 30
    #: texts in one call of the service's own batch classification, and bytes of its body
    batch_max: int = 1_000
    batch_bytes_max: int = 16 * 2**20
    requests_per_minute: int = 60_000
    #: wrong keys from one address in a minute; more are answered with 429
    failures_per_minute: int = 300
    training_seconds_max: float = 3_600.0
    training_bytes_max: int = 8 * 2**30
    #: a training that has ended this often without a result has failed
    crashes_max: int = 3
    token_seconds: int = 3_600
    #: of the classifiers that are held in memory
    loaded_bytes_max: int = 2 * 2**30
    #: uploads that are read and checked at the same time; others wait
    checks_at_once: int = 2
    #: for a client to send the whole of a body
    body_seconds_max: float = 600.0
    #: event streams of one owner at the same time
    streams_max: int = 100
