"""The examples of a run: for training, and held out for evaluation."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from retrain import noise
from retrain.data.records import Split
from retrain.data.sources import Harvest, NoHeldOutSplit, Request, collect
from retrain.errors import ConfigurationError
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config.schema import Data, TrainConfig

__all__ = ["LoadedExamples", "NoHeldOutSplit", "contamination_note", "fingerprint", "load_examples"]

_SUBSET_SEED = 0
"""max_examples takes the same problems whatever the run's seed is, spread over the whole set: sources are sorted by subject."""


@dataclass(frozen=True)
class LoadedExamples:
    examples: tuple[Example, ...]
    dropped: dict[str, int]
    """Rows that became no example, by reason."""
    notes: tuple[str, ...]
    """Sentences for the run's log."""
    data: "Data"
    """[data] as it applies here: [evaluation] source may have replaced the source."""

    def __len__(self) -> int:
        return len(self.examples)


def load_examples(config: "TrainConfig", split: Split = "train") -> LoadedExamples:
    """The training set of `[data]`, cut to `[training] max_examples`, or the whole held-out set that `[evaluation] source` names.

    Raises NoHeldOutSplit if there is nothing held out, another ConfigurationError if no example is left or the source is not known,
    EnvironmentFailure if the hub is needed and cannot be reached.
    """
    request = _request(config, split)
    harvest = collect(request)
    if not harvest.examples:
        raise ConfigurationError(_nothing_left(request, harvest))
    examples = _spread(_with_ids(harvest.examples, request.data.source), config.training.max_examples if split == "train" else 0)
    return LoadedExamples(examples, harvest.dropped, (*harvest.notes, *harvest.dropped_notes(), *_repeated_ids(examples)), request.data)


def _request(config: "TrainConfig", split: Split) -> Request:
    source = config.evaluation.source if split == "heldout" else ""
    if not source or source == config.data.source:
        return Request(config, config.data, split, named_for_evaluation=False)
    data = config.data.model_copy(update={"source": source, "path": "", "params": {}})
    return Request(config, data, split, named_for_evaluation=True)


def _nothing_left(request: Request, harvest: Harvest) -> str:
    details = "; ".join([*harvest.dropped_notes(), *harvest.notes]) or "it is empty"
    return f"{request.key} gives no example for {request.split}: {details}; check the file, prompt_column and answer_column."


def _with_ids(examples: Iterable[Example], source: str) -> list[Example]:
    return [example if example.example_id else replace(example, example_id=f"{source}-{i}") for i, example in enumerate(examples)]


def _spread(examples: Sequence[Example], limit: int) -> tuple[Example, ...]:
    """At most `limit` examples (0: all) in their order; a smaller limit takes a subset of a larger one's."""
    if not 0 < limit < len(examples):
        return tuple(examples)
    draws = noise.uniform(_SUBSET_SEED, noise.Stream.DATA_ORDER, 0, 0, 0, np.arange(len(examples)))
    return tuple(examples[index] for index in sorted(np.argsort(draws, kind="stable")[:limit].tolist()))


def _repeated_ids(examples: Sequence[Example]) -> list[str]:
    repeated = len(examples) - len({example.example_id for example in examples})
    return [f"Examples with another's example_id, whose results are counted together: {repeated:,}"] if repeated else []


def contamination_note(train: Iterable[Example], heldout: Iterable[Example]) -> str | None:
    """One sentence if a held-out problem is also trained on, word for word."""
    seen = {_prompt_key(example) for example in train}
    shared = [example.example_id for example in heldout if _prompt_key(example) in seen]
    if not shared:
        return None
    return f"Held-out problems that are also trained on: {len(shared):,}, the first is {shared[0]}; held-out accuracy is too high"


def fingerprint(examples: Iterable[Example]) -> str:
    """sha256 over ids, prompts and references, in order: two runs with the same one saw the same data."""
    digest = hashlib.sha256()
    for example in examples:
        line = json.dumps([example.example_id, example.prompt, example.reference])
        digest.update(line.encode("ascii") + b"\n")
    return digest.hexdigest()


def _prompt_key(example: Example) -> str:
    """The prompt without regard to white space."""
    messages = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
    return json.dumps([[message["role"], message["content"].split()] for message in messages])
