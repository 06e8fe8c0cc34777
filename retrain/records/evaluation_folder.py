"""The folder that `retrain eval` writes: every answer, counts per problem, the configuration, and a
log for Inspect's viewer.

Two such folders are compared in pairs of problems by `retrain compare ONE --baseline OTHER`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from retrain import __version__
from retrain.config import TrainConfig, dump_toml
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.records.disk import replace_file
from retrain.records.entries import SampleRecord
from retrain.records.environment import describe_environment
from retrain.records.evaluation import Evaluation
from retrain.records.jsonl import encode_line, finite
from retrain.records.redact import Redactor
from retrain.records.run_folder import kind_of, mark
from retrain.types import Group

KIND = "evaluation"
"""The kind of folder that the marker names."""
_SCORER = "reward"
_VALUES = {"right": "C", "wrong": "I", "could_not_judge": "N"}
"""Inspect's letters for correct, incorrect, and no answer."""


@dataclass(frozen=True)
class EvaluationFolder:
    path: Path

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def problems(self) -> Path:
        return self.path / "evaluation.jsonl"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def inspect_log(self) -> Path:
        return self.path / "inspect.json"

    @classmethod
    def new(cls, output: Path | None, target: Path) -> Self:
        """Choose an unused folder: `output`, or evaluations/<number> in the run's folder `target`,
        or logs/evaluations/<name>-<number>.

        Raises ConfigurationError for an `output` that holds something.
        """
        if output is not None:
            if output.exists() and (not output.is_dir() or any(output.iterdir())):
                raise ConfigurationError(
                    f"--output {output} is not an empty folder; name one that does not exist."
                )
            return cls(output)
        above, name = (
            (target / "evaluations", "")
            if target.is_dir()
            else (Path("logs") / "evaluations", f"{target.stem}-")
        )
        number = 1
        while (above / f"{name}{number}").exists():
            number += 1
        return cls(above / f"{name}{number}")

    def write(self, config: TrainConfig, evaluation: Evaluation, groups: Sequence[Group]) -> None:
        """Write the answers and everything beside them. Raises EnvironmentFailure if the folder
        cannot be written.
        """
        records = list(sample_records(groups))
        redactor = Redactor()
        shown = redactor.config(config)
        log = inspect_log(
            records,
            evaluation,
            model=shown.model.model,
            samples=shown.evaluation.samples,
            task=shown.data.source,
        )
        mark(self.path, KIND)
        try:
            replace_file(
                self.samples, b"".join(encode_line(record.to_json()) for record in records)
            )
            replace_file(
                self.problems,
                b"".join(encode_line(record.to_json()) for record in evaluation.problems),
            )
            replace_file(self.config, dump_toml(shown))
            replace_file(
                self.environment,
                _pretty(
                    redactor.json(describe_environment(shown.backend.devices) | {"command": None})
                ),
            )
            replace_file(self.inspect_log, _pretty(log))
            replace_file(self.summary, _pretty(evaluation.summary()))
        except OSError as error:
            raise EnvironmentFailure(
                f"{self.path} cannot be written: {error.strerror}; name another folder with"
                " --output."
            ) from error


def _pretty(content: dict[str, object]) -> bytes:
    return (
        json.dumps(finite(content), indent=1, ensure_ascii=False).encode(
            "utf-8", "backslashreplace"
        )
        + b"\n"
    )


def is_evaluation(folder: Path) -> bool:
    return folder.is_dir() and kind_of(folder) == KIND


def sample_records(groups: Sequence[Group]) -> Iterator[SampleRecord]:
    for group in groups:
        example = group.prompt.example
        for member in group.members:
            yield SampleRecord(
                example_id=example.example_id,
                task=example.task,
                sample=member.trajectory.sample,
                prompt=group.prompt.text,
                completion=member.text,
                reference=example.reference,
                reward=member.score.reward,
                outcome=str(member.score.outcome),
                reason=member.score.reason,
                finish_reason=str(member.trajectory.finish_reason),
                num_tokens=member.trajectory.num_actions,
            )


# -- the log for Inspect ---------------------------------------------------------------------------
#
# An evaluation in version 2 of Inspect's JSON form, which `inspect view` opens.
# Source: https://inspect.aisi.org.uk/eval-logs.html and the schema of inspect_ai.log.EvalLog.


def inspect_log(
    records: Sequence[SampleRecord], evaluation: Evaluation, *, model: str, samples: int, task: str
) -> dict[str, Any]:
    """Convert an evaluation to Inspect's form; the `samples` of a problem become Inspect's
    epochs.
    """
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    ids = list(dict.fromkeys(record.example_id for record in records))
    low, high = evaluation.interval
    values = {f"pass@{k}": rate for k, rate in evaluation.pass_at.items()} | {
        "interval_low": low,
        "interval_high": high,
    }
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
    answer = {
        "role": "assistant",
        "content": record.completion,
        "source": "generate",
        "model": f"retrain/{model}",
    }
    stop = "max_tokens" if record.finish_reason == "length" else "stop"
    score = {
        "value": _VALUES[record.outcome],
        "answer": record.completion[-200:],
        "explanation": record.reason or None,
    }
    return {
        "id": record.example_id,
        "epoch": record.sample + 1,
        "input": record.prompt,
        "target": record.reference,
        "messages": [{"role": "user", "content": record.prompt, "source": "input"}, answer],
        "output": {
            "model": f"retrain/{model}",
            "choices": [{"message": answer, "stop_reason": stop}],
        },
        "scores": {_SCORER: score | {"metadata": {"reward": record.reward}}},
        "metadata": {"task": record.task, "tokens": record.num_tokens},
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
    }
