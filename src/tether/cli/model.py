"""`tether export` and `tether classify`: what a run has trained, for use elsewhere and here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tether import api
from tether.cli.options import JsonOption, RunOrUrlArgument
from tether.cli.output import out
from tether.errors import UsageError
from tether.execution.checkpoint import save_tensors
from tether.tasks.text import CLASSIFIER, Classifier


def export(
    run_dir: RunOrUrlArgument,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write, such as model.safetensors or model.pt.")
    ],
) -> None:
    """Write the model of a run to one file, which safetensors or torch.load reads without Tether."""
    tensors, _ = api.trained_model(run_dir)
    save_tensors(tensors, file)
    count = sum(tensor.numel() for tensor in tensors.values())
    out.print(f"{file}: {len(tensors)} tensors with {count:,} values", highlight=False)


def classify(
    run_dir: RunOrUrlArgument,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT...", help="The texts, each in quotes.")],
    out_of_scope: Annotated[
        bool, typer.Option("--out-of-scope", help="Also say which texts are unlike all that was trained on.")
    ] = False,
    encoder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The encoder that the model was trained with, if any.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Classify texts with the model of a run of task text; prints label, probability and text."""
    classifier = _classifier(run_dir, encoder)
    found = [answers[0] for answers in classifier.classify(texts, top=1)]
    outside = classifier.out_of_scope(texts) if out_of_scope else [False] * len(texts)
    if as_json:
        rows = [
            {
                "text": text,
                "label": label,
                "probability": probability,
                **({"out_of_scope": is_outside} if out_of_scope else {}),
            }
            for text, (label, probability), is_outside in zip(texts, found, outside, strict=True)
        ]
        print(json.dumps({"texts": rows}))
        return
    for text, (label, probability), is_outside in zip(texts, found, outside, strict=True):
        note = "out of scope  " if is_outside else ""
        out.print(f"{label}  {probability:.1%}  {note}{text}", highlight=False, markup=False)


def _classifier(run_dir: str, encoder: Path | None) -> Classifier:
    """Of a run, or of a folder that has only a classifier, as the service gives out."""
    if (Path(run_dir) / CLASSIFIER).is_file():
        return Classifier.load(run_dir, encoder)
    files = api.task_files(run_dir)
    if CLASSIFIER not in files:
        raise UsageError(f"{run_dir} has no {CLASSIFIER}: classify needs a run of task text")
    return Classifier.from_bytes(files[CLASSIFIER], encoder)
