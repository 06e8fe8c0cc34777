"""The examples of a run: the training set, and the held-out set of its evaluations."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from retrain import noise
from retrain.data.readers import Split
from retrain.data.sources import NoHeldOutSplit, Query, ReadResult, read_source
from retrain.errors import ConfigurationError
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig

__all__ = ["NoHeldOutSplit", "contamination_note", "fingerprint", "load_examples"]

_SUBSET_SEED = 0
"""Seed of the subset that max_examples takes. It is the same for every run, and spread over the whole set, since sources are sorted by
subject."""


def load_examples(config: "TrainConfig", split: Split = "train") -> ReadResult:
    """Load the training set of `[data]`, cut to `[training] max_examples`, or the whole held-out set that `[evaluation] source` names.

    Raises NoHeldOutSplit if nothing is held out, another ConfigurationError if no example is left or the source is not known,
    EnvironmentFailure if the hub is needed and cannot be reached.
    """
    source = config.evaluation.source if split == "heldout" else ""
    apart = source not in ("", config.data.source)
    data = config.data.model_copy(update={"source": source, "path": "", "params": {}}) if apart else config.data
    query = Query(config, data, split, named_for_evaluation=apart)
    result = read_source(query)
    if not result.examples:
        details = "; ".join(filter(None, [result.dropped_rows(), *result.notes])) or "it is empty"
        kind = "training" if split == "train" else "held-out"
        raise ConfigurationError(f"{query.key} has no usable {kind} row: {details}; check the file, prompt_column and answer_column.")
    named = [
        example if example.example_id else replace(example, example_id=f"{data.source}-{index}")
        for index, example in enumerate(result.examples)
    ]
    result.examples = subset(named, config.training.max_examples if split == "train" else 0)
    if result.dropped:
        result.notes.append(f"Dropped rows: {result.dropped_rows()}")
    if repeated := len(result.examples) - len({example.example_id for example in result.examples}):
        result.notes.append(f"Examples that share their example_id with another, so that their results are counted together: {repeated:,}")
    return result


def subset(examples: list[Example], limit: int) -> list[Example]:
    """Take at most `limit` examples (0: all) in their order; the subset of a smaller limit is part of a larger limit's."""
    if not 0 < limit < len(examples):
        return examples
    draws = noise.uniform(_SUBSET_SEED, noise.Stream.DATA_ORDER, 0, 0, 0, np.arange(len(examples)))
    return [examples[index] for index in sorted(np.argsort(draws, kind="stable")[:limit].tolist())]


def contamination_note(train: Iterable[Example], heldout: Iterable[Example]) -> str | None:
    """Return one sentence if a held-out problem is also a training problem, word for word."""
    seen = {_prompt_key(example) for example in train}
    shared = [example.example_id for example in heldout if _prompt_key(example) in seen]
    if not shared:
        return None
    return f"Held-out problems that are also trained on: {len(shared):,}, the first is {shared[0]}; held-out accuracy is too high"


def _prompt_key(example: Example) -> str:
    """Return the prompt with its white space normalised."""
    messages = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
    return json.dumps([[message["role"], message["content"].split()] for message in messages])


def fingerprint(examples: Iterable[Example]) -> str:
    """Hash ids, prompts and references in order with sha256: two runs with the same fingerprint saw the same data."""
    digest = hashlib.sha256()
    for example in examples:
        line = json.dumps([example.example_id, example.prompt, example.reference])
        digest.update(line.encode("ascii") + b"\n")
    return digest.hexdigest()
