"""An evaluation as a log of Inspect (version 2 of its JSON form), which `inspect view` opens.

Source of the format: https://inspect.aisi.org.uk/eval-logs.html and the schema of inspect_ai.log.EvalLog.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from retrain import __version__
from retrain.records.entries import SampleRecord
from retrain.records.evaluation import Evaluation

_SCORER = "reward"
_VALUES = {"right": "C", "wrong": "I", "could_not_judge": "N"}
"""Inspect's letters for correct, incorrect, and no answer."""


def inspect_log(records: Sequence[SampleRecord], evaluation: Evaluation, *, model: str, samples: int, task: str) -> dict[str, Any]:
    """Convert an evaluation to Inspect's form; the `samples` of a problem become Inspect's epochs."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    ids = list(dict.fromkeys(record.example_id for record in records))
    low, high = evaluation.interval
    values = {f"pass@{k}": rate for k, rate in evaluation.pass_at.items()} | {"interval_low": low, "interval_high": high}
    metrics = {name: {"name": name, "value": value, "params": {}} for name, value in values.items()}
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "run_id": uuid4().hex,
            "created": now,
            "task": f"retrain/{task}",
            "task_id": uuid4().hex,
            "task_version": 0,
            "task_attribs": {},
            "task_args": {},
            "dataset": {"name": task, "samples": len(ids), "sample_ids": ids, "shuffled": False},
            "model": f"retrain/{model}",
            "model_args": {"step": evaluation.step},
            "config": {"epochs": samples},
            "packages": {"retrain": __version__},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": len(records),
            "completed_samples": len(records),
            "scores": [{"name": _SCORER, "scorer": _SCORER, "params": {}, "metrics": metrics}],
        },
        "stats": {"started_at": now, "completed_at": now, "model_usage": {}},
        "samples": [_sample(record, model) for record in records],
    }


def _sample(record: SampleRecord, model: str) -> dict[str, Any]:
    answer = {"role": "assistant", "content": record.completion, "source": "generate", "model": f"retrain/{model}"}
    stop = "max_tokens" if record.finish_reason == "length" else "stop"
    score = {"value": _VALUES[record.outcome], "answer": record.completion[-200:], "explanation": record.reason or None}
    return {
        "id": record.example_id,
        "epoch": record.sample + 1,
        "input": record.prompt,
        "target": record.reference,
        "messages": [{"role": "user", "content": record.prompt, "source": "input"}, answer],
        "output": {"model": f"retrain/{model}", "choices": [{"message": answer, "stop_reason": stop}]},
        "scores": {_SCORER: score | {"metadata": {"reward": record.reward}}},
        "metadata": {"task": record.task, "tokens": record.num_tokens},
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
    }
