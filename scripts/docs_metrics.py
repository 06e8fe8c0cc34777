"""docs/metrics.md: every field of the lines that a run writes, made from the dataclasses of
entries.py and their field docstrings.
"""

import ast
import inspect
import textwrap
from dataclasses import fields

from retrain.records.entries import EvaluationRecord, GenerationRecord, SampleRecord, StepRecord

RECORDS = {
    "metrics.jsonl": StepRecord,
    "evaluation.jsonl": EvaluationRecord,
    "emergence/generations.jsonl": GenerationRecord,
    "evaluations/*/samples.jsonl": SampleRecord,
}
"""File of a run's folder -> the record that each of its lines holds."""

INTRODUCTION = """\
# What a run records

Look up every field that a run writes. [Watch a run](reading-a-run.md) says which of them to look at, and
when to worry.

Each file holds one JSON object per line. A value that a step lacks is `null`, never 0. Entropies,
surprisals, log-probs and log-ratios are in nats, times in seconds, memory in GiB. "better" is the
direction that `retrain compare --metric NAME` takes for an improvement. With a dash, `compare` only says
whether there is a difference. `make docs` writes this page from `retrain/records/entries.py`.
"""


def metrics_document() -> str:
    """The text of docs/metrics.md: one table per file, one row per field."""
    return (
        "\n\n".join(
            [INTRODUCTION.rstrip(), *(_table(file, record) for file, record in RECORDS.items())]
        )
        + "\n"
    )


def field_docs(record: type) -> dict[str, str]:
    """Field -> its docstring, on one line; "" for a field without one."""
    body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    name = ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            docs[name] = ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            docs[name] = " ".join(str(node.value.value).split())
    return docs


def _table(file: str, record: type) -> str:
    docs = field_docs(record)
    about = " ".join((inspect.getdoc(record) or "").split())
    has_directions = any("better" in field.metadata for field in fields(record))
    heads = ["field", "type", *(["better"] if has_directions else []), "what it is"]
    rows = [heads, ["---"] * len(heads)]
    for field in fields(record):
        kind = (
            str(getattr(field.type, "__name__", field.type))
            .removesuffix(" | None")
            .replace("|", "\\|")
        )
        direction = [field.metadata.get("better") or "-"] if has_directions else []
        rows.append([f"`{field.name}`", kind, *direction, docs[field.name].replace("|", "\\|")])
    return f"## {file}\n\n{about}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)
