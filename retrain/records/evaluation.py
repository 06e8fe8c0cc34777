"""Compute and store a held-out evaluation: pass@1 with an interval clustered by problem, and
unbiased pass@k. `retrain eval` writes a folder of every answer, counts per problem, the
configuration, and a log for Inspect's viewer.

The unit is the problem, not the sample: samples of one problem correlate, so the interval uses the
variance of the problems' means. `retrain compare ONE --baseline OTHER` compares two folders in
pairs of problems.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from itertools import count, groupby
from math import comb, sqrt
from pathlib import Path
from typing import Self
from uuid import uuid4

import numpy as np

from retrain import __version__
from retrain.config import TrainConfig, dump_toml
from retrain.errors import ConfigurationError
from retrain.records.disk import replace_file
from retrain.records.entries import EvaluationRecord, SampleRecord
from retrain.records.environment import describe_environment
from retrain.records.jsonl import encode_line, finite
from retrain.records.redact import Redactor
from retrain.records.run_folder import FolderEntry, RunFolder, kind_of, mark
from retrain.records.state import Stage
from retrain.system import Json
from retrain.types import Group

Z_95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution: a 95% interval is the estimate, plus and minus
this many standard errors."""

MIN_FOR_WILSON = 100
"""With fewer problems a Wilson interval on the effective sample size covers too little: 87% instead
of 95% of some simulated cases."""


@lru_cache(maxsize=4096)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Return unbiased pass@k, the probability that k samples contain a right one. For c right
    samples of n it is 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1. Raises ValueError unless 0 <= c <= n and
    1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def clustered_interval(means: Sequence[float], samples: int) -> tuple[float, float]:
    """Return the 95% interval of the mean of per-problem accuracies [n] that rest on `samples`
    judged completions in all.

    It is a Wilson score interval on the effective sample size p(1-p)/SE**2, with SE from the spread
    of the problems' means. It stays inside [0, 1] and does not collapse at 0 or 1. The size is n if
    that spread is zero, and never above `samples`. Below MIN_FOR_WILSON problems the spread says
    little, so this is the exact interval of a proportion. Its size is n if each problem has one
    answer. Otherwise it is the effective size times (z/t)**2 with n - 1 degrees of freedom
    (benchmarks/results/one-evaluation-2026-11-24.md). Sources: Dean and Pagano 2015, doi
    10.1093/jssam/smv024. Clopper and Pearson 1934. Korn and Graubard 1998, Survey Methodology 24.
    """
    from scipy.special import stdtrit

    n = len(means)
    if n == 0:
        return 0.0, 1.0
    p = float(np.mean(means))
    variance = float(np.var(means, ddof=1)) / n if n > 1 else 0.0
    size = min(p * (1 - p) / variance, float(samples)) if variance > 0 else float(n)
    if n >= MIN_FOR_WILSON:
        return wilson_interval(p, size)
    if samples == n or n < 2:
        return exact_interval(p, float(n))
    return exact_interval(p, size * (Z_95 / float(stdtrit(n - 1, 0.975))) ** 2)


def exact_interval(p: float, size: float) -> tuple[float, float]:
    """Return the 95% interval of Clopper and Pearson for a proportion p of `size` draws, which may
    be an effective number.
    """
    from scipy.special import betaincinv

    right, wrong = p * size, (1 - p) * size
    low = float(betaincinv(right, wrong + 1, 0.025)) if right > 0 else 0.0
    high = float(betaincinv(right + 1, wrong, 0.975)) if wrong > 0 else 1.0
    return low, high


def wilson_interval(p: float, size: float) -> tuple[float, float]:
    """Return the 95% score interval of a proportion p from `size` independent draws, which may be
    an effective number.
    """
    scale = 1 + Z_95**2 / size
    center = (p + Z_95**2 / (2 * size)) / scale
    half = Z_95 / scale * sqrt(p * (1 - p) / size + Z_95**2 / (4 * size**2))
    return max(0.0, center - half), min(1.0, center + half)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation. All reported figures follow from its problems, so evaluation.jsonl holds the
    whole evaluation.
    """

    step: int
    """Completed steps of its stage at the time of the evaluation."""
    problems: Sequence[EvaluationRecord]
    ks: Sequence[int] = (1,)
    seconds: float = 0.0
    tokens: int = 0
    heldout_sha256: Mapping[str, str] = field(default_factory=dict)
    """Task -> sha256 of its examples."""
    stage: Stage = "rl"

    @property
    def pass_at(self) -> dict[int, float]:
        """k -> unbiased pass@k, the mean over the problems with at least k judged samples; a k that
        no problem reaches is absent.
        """
        rates = {k: self._pass_rates(k) for k in self.ks}
        return {k: float(np.mean(found)) for k, found in rates.items() if found}

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of pass@1."""
        return self.interval_at(1)

    def interval_at(self, k: int) -> tuple[float, float]:
        """Return the 95% interval of pass@k, for which `samples` answers count as samples // k
        draws of k.
        """
        draws = sum(item.samples // k for item in self.problems)
        return clustered_interval(self._pass_rates(k), draws)

    def _pass_rates(self, k: int) -> list[float]:
        """Return pass@k of each problem with at least k judged samples."""
        enough = (item for item in self.problems if item.samples >= k)
        return [pass_at_k(item.samples, item.correct, k) for item in enough]

    @property
    def by_task(self) -> dict[str, "Evaluation"]:
        """Task -> the evaluation of its problems, in the order of their first problem."""
        return {
            task: replace(self, problems=[item for item in self.problems if item.task == task])
            for task in dict.fromkeys(item.task for item in self.problems)
        }

    def difference_from(self, before: "Evaluation") -> tuple[float, tuple[float, float]] | None:
        """Return the mean difference in accuracy over the problems that both have judged, and
        Student's 95% interval over these problems; None below two shared problems.

        It pairs by problem, so it is narrower than two separate intervals suggest.
        """
        from scipy.special import stdtrit

        earlier, later = before._rates(), self._rates()
        d = np.array([rate - earlier[name] for name, rate in later.items() if name in earlier])
        if len(d) < 2:
            return None
        half = float(stdtrit(len(d) - 1, 0.975)) * float(d.std(ddof=1)) / sqrt(len(d))
        return float(d.mean()), (float(d.mean()) - half, float(d.mean()) + half)

    def _rates(self) -> dict[tuple[str, int], float]:
        """Map each id, with its number among the problems of that id, to the judged accuracy; data
        may repeat an id.
        """
        seen, rates = Counter[str](), dict[tuple[str, int], float]()
        for item in self.problems:
            if item.samples:
                rates[item.example_id, seen[item.example_id]] = item.correct / item.samples
            seen[item.example_id] += 1
        return rates

    def _scores(self) -> Json:
        """Return pass@k and the intervals for summary.json; a task without a judged problem has
        none.
        """
        found = sorted(self.pass_at.items())
        rates = {f"pass@{k}": rate for k, rate in found}
        return rates | {f"pass@{k}_interval": list(self.interval_at(k)) for k, _ in found}

    def summary(self) -> Json:
        """Return the form that summary.json and `retrain eval --json` hold."""
        values, tasks = self._scores(), self.by_task
        values.pop("pass@1_interval", None)  # It is `interval`.
        if len(tasks) > 1:
            values["tasks"] = {
                task: part._scores() | {"problems": len(part.problems)}
                for task, part in tasks.items()
            }
        if self.stage == "sft":
            values["stage"] = self.stage
        return values | {
            "interval": list(self.interval),
            "step": self.step,
            "problems": len(self.problems),
            "samples": sum(problem.samples for problem in self.problems),
            "could_not_judge": sum(problem.could_not_judge for problem in self.problems),
        }


def read_evaluations(path: Path, ks: Iterable[int], stage: Stage = "rl") -> list[Evaluation]:
    """Return the evaluations in evaluation.jsonl, or in the file of a `stage`, oldest first. Raises
    RunFailed for a damaged file.
    """
    by_step = groupby(EvaluationRecord.read(path), key=lambda record: record.step)
    return [
        Evaluation(step, [*problems], sorted({1, *ks}), stage=stage) for step, problems in by_step
    ]


# -- the folder that `retrain eval` writes ---------------------------------------------------------


KIND = "evaluation"
"""The kind of folder that the marker names."""
_SCORER = "reward"
_VALUES = {"right": "C", "wrong": "I", "could_not_judge": "N"}
"""Inspect's letters for correct, incorrect, and no answer."""


class EvaluationFolder(RunFolder):
    """A folder with some of a run's files, and two of its own."""

    samples = FolderEntry("samples.jsonl")
    problems = FolderEntry("evaluation.jsonl")
    inspect_log = FolderEntry("inspect.json")

    @classmethod
    def new(cls, output: Path | None, target: Path) -> Self:
        """Choose an unused folder: `output`, or evaluations/<number> in the run's folder `target`,
        or logs/evaluations/<name>-<number>.

        Raises ConfigurationError for an `output` that is not empty.
        """
        if output is not None:
            if output.is_file() or any(output.glob("*")):
                raise ConfigurationError(
                    f"--output {output} is not an empty folder; name one that does not exist."
                )
            return cls(output)
        begin = f"{target}/evaluations/" if target.is_dir() else f"logs/evaluations/{target.stem}-"
        paths = (Path(f"{begin}{number}") for number in count(1))
        return cls(next(path for path in paths if not path.exists()))

    def write(self, config: TrainConfig, evaluation: Evaluation, groups: Sequence[Group]) -> None:
        """Write the answers and the other files of the folder. Raises OSError."""
        records = list(sample_records(groups))
        redactor = Redactor()
        shown = redactor.config(config)
        log = inspect_log(
            records,
            evaluation,
            model=f"retrain/{shown.model.model}",
            samples=max(part.samples for part in shown.evaluation.parts),
            task="+".join(evaluation.by_task) or shown.data.source,
        )
        mark(self.path, KIND)
        for path, lines in ((self.samples, records), (self.problems, evaluation.problems)):
            replace_file(path, b"".join(encode_line(line.to_json()) for line in lines))
        replace_file(self.config, dump_toml(shown))
        environment = describe_environment(shown.backend.devices) | {
            "command": None,
            "heldout_sha256": dict(evaluation.heldout_sha256),
        }
        replace_file(self.environment, _pretty(redactor.json(environment)))
        replace_file(self.inspect_log, _pretty(log))
        replace_file(self.summary, _pretty(evaluation.summary()))


def _pretty(content: dict[str, object]) -> bytes:
    text = json.dumps(finite(content), indent=1, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def is_evaluation(folder: Path) -> bool:
    return kind_of(folder) == KIND


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
) -> Json:
    """Convert an evaluation to Inspect's form; the `samples` of a problem become Inspect's
    epochs.
    """
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    ids = list(dict.fromkeys(record.example_id for record in records))
    low, high = evaluation.interval
    values = {f"pass@{k}": rate for k, rate in evaluation.pass_at.items()}
    values |= {"interval_low": low, "interval_high": high}
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
            "model": model,
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


def _sample(record: SampleRecord, model: str) -> Json:
    answer = {
        "role": "assistant",
        "content": record.completion,
        "source": "generate",
        "model": model,
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
            "model": model,
            "choices": [{"message": answer, "stop_reason": stop}],
        },
        "scores": {_SCORER: score | {"metadata": {"reward": record.reward}}},
        "metadata": {"task": record.task, "tokens": record.num_tokens},
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
    }
