"""The held-out evaluation of untrained weights, made once for the runs of a campaign that would
make the same bytes.

Runs that share a seed evaluate the same prompts with the same noise, and before step 0 with the
same weights. The first makes the result, and the others wait for it. It is stored under the sha256
of all that it depends on, so that a run takes what it would make, or makes it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from retrain import __version__
from retrain.config import TrainConfig
from retrain.config.load import with_judging_reward
from retrain.config.names import table
from retrain.model.text import model_files, model_fingerprint
from retrain.records.disk import replace_file
from retrain.records.entries import EvaluationRecord
from retrain.records.evaluation import Evaluation
from retrain.run.evaluation import Evaluator
from retrain.run.parts import Parts
from retrain.system import read_object

_POLL_S = 0.1
_CREDIT = ("algorithm", "gtpo", "hicra", "sepa", "planning", "loss", "optimizer")
_DIFFER = (*_CREDIT, "logging", "resume", "campaign", "squeeze")
"""Sections that no evaluation of untrained weights depends on."""

_folder: Path | None = None


@contextmanager
def common_results(folder: Path) -> Iterator[None]:
    """Take what runs have in common from `folder`, and put it there."""
    global _folder  # noqa: PLW0603 - one place per process, which a campaign sets
    before, _folder = _folder, folder
    try:
        yield
    finally:
        _folder = before


def evaluated_once(
    config: TrainConfig,
    parts: Parts,
    evaluator: Evaluator,
    make: Callable[[], Evaluation],
    check: Callable[[], None],
) -> Evaluation:
    """Return what `make` returns, or returned in an earlier run with the same inputs; `check` is
    called while another run makes it.
    """
    inputs = _inputs(config, parts, evaluator)
    if _folder is None or inputs is None:
        return make()
    text = json.dumps(inputs, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()
    _folder.mkdir(parents=True, exist_ok=True)
    file, lock = _folder / f"{key}.json", FileLock(_folder / f"{key}.lock")
    while not _taken(lock):
        check()
    try:
        stored = {}
        if file.exists():
            stored = read_object(file)
        if stored.get("inputs") == inputs:
            problems = [EvaluationRecord.from_json(line, file) for line in stored["problems"]]
            return Evaluation(0, problems, evaluator.ks, tokens=stored["tokens"])
        made = make()
        content = {
            "inputs": inputs,
            "tokens": made.tokens,
            "problems": [problem.to_json() for problem in made.problems],
        }
        replace_file(file, json.dumps(content) + "\n")
        return made
    finally:
        lock.release()


def _taken(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=_POLL_S)
    except Timeout:
        return False
    return True


def _inputs(config: TrainConfig, parts: Parts, evaluator: Evaluator) -> dict[str, Any] | None:
    """Return what the evaluation depends on; None where it may differ between equal inputs, or is
    not made in this process.
    """
    backend = parts.backend
    rewards = table("reward")
    kinds = with_judging_reward(config).reward.types
    by_rule = all(kind in rewards and rewards[kind].compares_answers for kind in kinds)
    exact = backend.capabilities.exact_resume and backend.engine.capabilities.in_process
    if parts.stage or not by_rule or not exact:
        return None
    import torch

    seen = hashlib.sha256()
    for prompt in evaluator.prompts:
        example = prompt.example
        seen.update(json.dumps([prompt.prompt_id, example.task, example.reference]).encode())
        seen.update(np.asarray(prompt.token_ids, np.int64).tobytes())
    with TemporaryDirectory() as folder:
        backend.save_adapter(Path(folder))
        weights = hashlib.sha256((Path(folder) / "adapter_model.safetensors").read_bytes())
    sections = json.loads(config.model_dump_json(exclude=set(_DIFFER)))
    return {
        "retrain": __version__,
        "torch": torch.__version__,
        "config": sections,
        # the time of a file's change shows an edit, the commit what a branch of the hub holds
        "model": [*map(list, model_files(config.model.model)), model_fingerprint(config.model)],
        # the number of workers may differ between the seeds of a campaign, and changes no byte
        "choices": asdict(replace(backend.choices, workers=1)) if backend.choices else None,
        "adapter": weights.hexdigest(),
        "prompts": seen.hexdigest(),
        "sampling": [[len(prompts), repr(plan)] for prompts, plan in evaluator.sets],
    }
