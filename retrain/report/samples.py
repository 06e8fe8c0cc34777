"""Completions in a report: a few steps of a few runs, from generations.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.analysis.runs import StoredRun
from retrain.records.entries import GenerationRecord
from retrain.records.jsonl import read_jsonl
from retrain.report.curves import ConditionCurves

_LONGEST = 4000
"""Characters of a text that are shown."""
_MOST_RUNS = 6


@dataclass(frozen=True)
class Sample:
    record: GenerationRecord

    @property
    def prompt(self) -> str:
        return _cut(self.record.prompt)

    @property
    def completion(self) -> str:
        return _cut(self.record.completion)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(text) - _LONGEST:,} more characters)"


@dataclass(frozen=True)
class SampledStep:
    step: int
    samples: Sequence[Sample]

    @property
    def right(self) -> int:
        return sum(sample.record.outcome == "right" for sample in self.samples)


@dataclass(frozen=True)
class SampledRun:
    label: str
    name: str
    steps: Sequence[SampledStep]


def sampled_runs(arms: Sequence[ConditionCurves], steps_per_run: int) -> list[SampledRun]:
    """The first run with completions of each condition; in a campaign these share a seed and therefore their prompts."""
    found = []
    for arm in arms[:_MOST_RUNS]:
        run = next((run for run in arm.runs if run.folder.generations.is_file()), None)
        steps = sampled_steps(run, steps_per_run) if run else []
        if run and steps:
            found.append(SampledRun(arm.label, run.name, steps))
    return found


def sampled_steps(run: StoredRun, count: int) -> list[SampledStep]:
    """Choose `count` steps, evenly spaced between the first and the last step with completions."""
    steps = sorted({line["step"] for line in read_jsonl(run.folder.generations)})
    wanted = {steps[index] for index in np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int)}
    by_step: dict[int, list[Sample]] = {step: [] for step in sorted(wanted)}
    for line in read_jsonl(run.folder.generations):
        if line["step"] in by_step:
            by_step[line["step"]].append(Sample(GenerationRecord.from_json(line, run.folder.generations)))
    return [SampledStep(step, samples) for step, samples in by_step.items()]
