"""Results that runs of a campaign have in common before step 0, made once: the parity gate, the
held-out evaluation of the untrained weights, and the completions of the first step.

Runs that share a seed use the same prompts and the same noise, and before step 0 the same weights.
The first makes a result, and the others wait for it. It is stored under the sha256 of all that it
depends on, so that a run takes what it would make, or makes it. What a run does with it, it does
itself: it scores the completions and the gold answers by its own reward. The seconds that it took
count for each run, so that their hours compare.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from retrain.backends.declared import declared_backend, declared_engine
from retrain.config import TrainConfig
from retrain.config.load import with_judging_reward
from retrain.config.names import table
from retrain.errors import RunFailed
from retrain.inference_engine.base import InferenceEngine, SampleRequest
from retrain.model.text import model_files, model_fingerprint
from retrain.plugins import plugin_hashes
from retrain.records.disk import replace_file
from retrain.records.entries import EvaluationRecord
from retrain.records.environment import describe_environment
from retrain.records.evaluation import Evaluation
from retrain.run.dialogues import SamplingPlan, Watcher
from retrain.run.evaluation import Evaluator
from retrain.run.gate import GateResult
from retrain.run.gate_fits import GateInputs
from retrain.run.parts import Parts
from retrain.run.rollout import Rollout
from retrain.system import read_object
from retrain.types import Completion, FinishReason, Prompt

_POLL_S = 0.1
_CREDIT = ("algorithm", "gtpo", "hicra", "sepa", "planning", "loss", "optimizer")
_JUDGING = ("reward", "evaluation")
_DIFFER = (*_CREDIT, *_JUDGING, "training", "logging", "resume", "campaign", "squeeze")
"""Sections whose values no result depends on, but for those that are among its own inputs."""

_LEARNING = {
    "max_steps", "lr", "lr_schedule", "lr_horizon", "lr_warmup_steps", "weight_decay",
    "updates_per_batch", "minibatches", "save_every", "keep_checkpoints", "max_hours",
}  # fmt: skip
"""Keys of [training] that act only after the first completions."""

Result = TypeVar("Result")
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


def settings_in_common(config: TrainConfig) -> str:
    """Return the settings that all results of a run before its first optimizer step depend on:
    equal in runs that take them from each other. "" where a run makes some of them itself.
    """
    engine, training = declared_engine(config), config.training
    exact = declared_backend(config).exact_resume and engine is not None and engine.in_process
    if config.environment.provider or not exact or _selects(config):
        return ""
    parts = [
        config.model_dump_json(exclude=set(_DIFFER)),
        training.model_dump_json(exclude=_LEARNING),
    ]
    if config.evaluation.at_start:
        parts.append(with_judging_reward(config).model_dump_json(include=set(_JUDGING)))
    return json.dumps(parts)


def _selects(config: TrainConfig) -> bool:
    """True if rewards or measured seconds decide about the completions of a step."""
    return config.training.dynamic_sampling > 0 or config.backpressure.enabled


class Common:
    """The results of one run before its first optimizer step that other runs may have made."""

    def __init__(self, config: TrainConfig, parts: Parts, check: Callable[[], None]) -> None:
        """`check` is called while another run makes a result."""
        self._config, self._parts, self._check = config, parts, check

    def gate(
        self, inputs: GateInputs, prompts: list[Prompt], make: Callable[[], GateResult]
    ) -> GateResult:
        """The gate's result, but for the gold answers, which each run scores."""
        plain = (str, int, float, bool)
        values = {k: v for k, v in vars(inputs).items() if isinstance(v, plain)}
        own = values | {"truncation": repr(inputs.truncation), "prompts": _digest(prompts)}
        return self._once(
            "gate", own, make, GateResult.to_json, lambda stored: GateResult(**stored)
        )

    def evaluation(self, evaluator: Evaluator, watcher: Watcher) -> Evaluation:
        """The evaluation of the untrained weights; another run's where a rule says what is
        right.
        """

        def make() -> Evaluation:
            return evaluator.run(0, watcher)[0]

        rewards, judging = table("reward"), with_judging_reward(self._config)
        kinds = judging.reward.types
        if not all(kind in rewards and rewards[kind].compares_answers for kind in kinds):
            return make()

        def dumped(made: Evaluation) -> dict[str, Any]:
            problems = [one.to_json() for one in made.problems]
            return {"tokens": made.tokens, "seconds": made.seconds, "problems": problems}

        def read(stored: dict[str, Any]) -> Evaluation:
            place = Path("evaluation.jsonl")
            problems = [EvaluationRecord.from_json(line, place) for line in stored["problems"]]
            tokens, seconds = stored["tokens"], stored["seconds"]
            return Evaluation(0, problems, evaluator.ks, seconds=seconds, tokens=tokens)

        own = {
            "judging": json.loads(judging.model_dump_json(include=set(_JUDGING))),
            "max_failure_rate": self._config.reward.max_failure_rate,
            "prompts": _digest(evaluator.prompts),
            "sampling": [[len(prompts), repr(plan)] for prompts, plan in evaluator.sets],
        }
        return self._once("evaluation", own, make, dumped, read)

    def rollout(self, prompts: list[Prompt], plan: SamplingPlan, watcher: Watcher) -> Rollout:
        """The first step's rollout. Only its completions are another run's, and not where rewards
        or measured seconds decide about them.
        """
        sampler = copy(self._parts.sampler)
        if _selects(self._config):
            return sampler.draw(prompts, 0, plan, watcher)
        drawn, heard, seconds = list[Rollout](), list[Completion](), 0.0

        def hear(completion: Completion) -> None:
            heard.append(completion)
            watcher.completion(completion)

        def make() -> list[Completion]:
            drawn.append(sampler.draw(prompts, 0, plan, replace(watcher, completion=hear)))
            return heard

        def dumped(made: list[Completion]) -> dict[str, Any]:
            seconds = drawn[0].sample_seconds
            return {"seconds": seconds, "completions": [_dumped(one) for one in made]}

        def read(stored: dict[str, Any]) -> list[Completion]:
            nonlocal seconds
            seconds = stored["seconds"]
            return [_read(one) for one in stored["completions"]]

        own = {"prompts": _digest(prompts), "sampling": repr(plan)}
        completions = self._once("completions", own, make, dumped, read)
        if not drawn:
            sampler.engine = _Stored(sampler.engine, completions)
            rollout = sampler.draw(prompts, 0, plan, watcher)
            rollout.sample_seconds = rollout.stored_seconds = seconds
            drawn.append(rollout)
        return drawn[0]

    def _once(
        self,
        kind: str,
        own: dict[str, Any],
        make: Callable[[], Result],
        dumped: Callable[[Result], Any],
        read: Callable[[Any], Result],
    ) -> Result:
        """Return what `make` returns, or returned in an earlier run with the same inputs: `own`,
        and the inputs of every result.
        """
        if _folder is None or self._inputs is None:
            return make()
        inputs = {"result": kind, **own, **self._inputs}
        key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        _folder.mkdir(parents=True, exist_ok=True)
        file, lock = _folder / f"{key}.json", FileLock(_folder / f"{key}.lock")
        while not _taken(lock):
            self._check()
        try:
            stored = _whole(file)
            if stored.get("inputs") == inputs:
                return read(stored["made"])
            made = make()
            content = {"inputs": inputs, "made": dumped(made)}
            sealed = content | {"sha256": _seal(content["made"])}
            replace_file(file, json.dumps(sealed) + "\n")
            return made
        finally:
            lock.release()

    @cached_property
    def _inputs(self) -> dict[str, Any] | None:
        """The inputs of every result; None where equal inputs may give other results, or it is
        not made in this process.
        """
        config, backend = self._config, self._parts.backend
        exact = backend.capabilities.exact_resume and backend.engine.capabilities.in_process
        if self._parts.stage or not exact:
            return None
        described = describe_environment(backend.device_name)
        with TemporaryDirectory() as folder:
            backend.save_adapter(Path(folder))
            weights = hashlib.sha256((Path(folder) / "adapter_model.safetensors").read_bytes())
        return {
            # a run may have another machine of a cluster, or go on after an update
            **{name: described[name] for name in ("retrain", "packages", "cpu", "device_name")},
            "plugins": plugin_hashes(config, _DIFFER),
            "config": json.loads(config.model_dump_json(exclude=set(_DIFFER))),
            # the time of a file's change shows an edit, the commit what a branch of the hub holds
            "model": [*map(list, model_files(config.model.model)), model_fingerprint(config.model)],
            # the number of workers may differ between the seeds of a campaign, and changes no byte
            "choices": asdict(replace(backend.choices, workers=1)) if backend.choices else None,
            "adapter": weights.hexdigest(),
        }


class _Stored(InferenceEngine):
    """Gives what an engine sampled in another run, in its order."""

    def __init__(self, engine: InferenceEngine, completions: list[Completion]) -> None:
        self.capabilities, self._completions = engine.capabilities, completions

    def sample(self, requests: Sequence[SampleRequest]) -> Iterator[Completion]:  # noqa: ARG002 - equal to the other run's
        yield from self._completions


def _whole(file: Path) -> dict[str, Any]:
    """Return a stored result; {} if there is none, or it was damaged or changed, so that it is made
    anew.
    """
    try:
        stored = read_object(file)
    except (FileNotFoundError, RunFailed):
        return {}
    return stored if stored.get("sha256") == _seal(stored.get("made")) else {}


def _seal(made: Any) -> str:
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()


def _taken(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=_POLL_S)
    except Timeout:
        return False
    return True


def _digest(prompts: list[Prompt]) -> str:
    seen = hashlib.sha256()
    for prompt in prompts:
        example = prompt.example
        seen.update(json.dumps([prompt.prompt_id, example.task, example.reference]).encode())
        seen.update(np.asarray(prompt.token_ids, np.int64).tobytes())
    return seen.hexdigest()


_PLAIN = ("request", "sample", "finish_reason")
_ARRAYS = {"token_ids": np.int32, "logprobs": np.float32, "entropies": np.float32, "kept": np.int32}


def _dumped(completion: Completion) -> dict[str, Any]:
    """As JSON, in which a float32 is the same number when it is read."""
    values = {name: getattr(completion, name) for name in (*_ARRAYS, *_PLAIN)}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def _read(stored: dict[str, Any]) -> Completion:
    arrays = {
        name: None if stored[name] is None else np.array(stored[name], kind)
        for name, kind in _ARRAYS.items()
    }
    plain = {name: stored[name] for name in _PLAIN}
    reason = FinishReason(stored["finish_reason"])
    return Completion(**{**plain, **arrays, "finish_reason": reason})
