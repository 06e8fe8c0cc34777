"""The examples of a run, for training and for its evaluations, and their prompts: encoded once, in
an order that is a pure function of (seed, cursor).
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from retrain import noise
from retrain.data.chat import encode_texts, messages_of, render_text
from retrain.data.readers import Split
from retrain.data.sources import Query, ReadResult, dropped_words, read_source
from retrain.errors import ConfigurationError
from retrain.model.text import TextModel
from retrain.types import Example, Prompt

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig, Training

_CHUNK = 2_048  # prompts that the tokenizer encodes in one call, in parallel threads
_SUBSET_SEED = 0
"""Seed of the subset that max_examples takes. It is the same for every run, and spread over the
whole set, since sources are sorted by subject."""


def load_examples(config: "TrainConfig", split: Split = "train") -> ReadResult:
    """Load the training set of `[data]`, cut to `[training] max_examples`, or the whole held-out
    set that `[evaluation] source` names.

    Raises NoHeldOutSplit if nothing is held out, another ConfigurationError if no example is left
    or the source is not known, EnvironmentFailure if the hub is needed and cannot be reached.
    """
    source = config.evaluation.source if split == "heldout" else ""
    apart = source not in ("", config.data.source)
    data = (
        config.data.model_copy(update={"source": source, "path": "", "params": {}})
        if apart
        else config.data
    )
    query = Query(config, data, split, named_for_evaluation=apart)
    result = read_source(query)
    if not result.examples:
        details = "; ".join(filter(None, [result.dropped_rows(), *result.notes])) or "it is empty"
        kind = "training" if split == "train" else "held-out"
        raise ConfigurationError(f"{query.key} has no usable {kind} row: {details}.")
    named = [
        example if example.example_id else replace(example, example_id=f"{data.source}-{index}")
        for index, example in enumerate(result.examples)
    ]
    result.examples = subset(named, config.training.max_examples if split == "train" else 0)
    if result.dropped:
        result.notes.append(f"Dropped rows: {result.dropped_rows()}")
    if repeated := len(result.examples) - len({example.example_id for example in result.examples}):
        result.notes.append(
            "Examples that share their example_id with another, so that their results are counted"
            f" together: {repeated:,}"
        )
    return result


def subset(examples: list[Example], limit: int) -> list[Example]:
    """Take at most `limit` examples (0: all) in their order; the subset of a smaller limit is part
    of a larger limit's.
    """
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
    return (
        f"Held-out problems that are also trained on: {len(shared):,}, the first is {shared[0]};"
        " held-out accuracy is too high"
    )


def _prompt_key(example: Example) -> str:
    """Return the prompt with its white space normalised."""
    messages = (
        [{"role": "user", "content": example.prompt}]
        if isinstance(example.prompt, str)
        else example.prompt
    )
    return json.dumps([[message["role"], message["content"].split()] for message in messages])


def fingerprint(examples: Iterable[Example]) -> str:
    """Hash ids, prompts and references in order with sha256: two runs with the same fingerprint saw
    the same data.
    """
    digest = hashlib.sha256()
    for example in examples:
        line = json.dumps([example.example_id, example.prompt, example.reference])
        digest.update(line.encode("ascii") + b"\n")
    return digest.hexdigest()


# -- prompts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run. Each epoch is shuffled anew by the seed and the epoch alone, so all
    conditions of one seed see the same prompts at the same step, and resuming needs only the
    cursor.
    """

    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()
    """Sentences for the start of the run."""

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, cursor: int, count: int, seed: int) -> list[Prompt]:
        """Return prompts cursor .. cursor + count - 1, counted from the start of the run over all
        epochs.
        """
        size = len(self.prompts)
        return [
            self.prompts[epoch_order(seed, place // size, size)[place % size]]
            for place in range(cursor, cursor + count)
        ]

    @property
    def fingerprint(self) -> str:
        """sha256 over example ids, prompts and references, in the source's order."""
        return fingerprint(prompt.example for prompt in self.prompts)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> npt.NDArray[np.intp]:
    """Return the permutation of one epoch, [size], from the ranks of counter-based uniforms."""
    draws = noise.uniform(seed, noise.Stream.DATA_ORDER, epoch, 0, 0, np.arange(size))
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False  # it is cached
    return order


def encode_prompts(training: "Training", text: TextModel, loaded: ReadResult) -> PromptSet:
    """Render and encode every example once.

    A prompt that leaves no room for a token in the model's context is dropped. A completion has
    `[training] max_tokens`, or the rest of the context if that is less. Raises ConfigurationError
    if no prompt fits.
    """
    too_long: list[str] = []
    prompts: list[Prompt] = []
    for start in range(0, len(loaded), _CHUNK):
        examples = loaded.examples[start : start + _CHUNK]
        texts = [render_text(text.tokenizer, example, loaded.data) for example in examples]
        for example, rendered, token_ids in zip(
            examples, texts, encode_texts(text.tokenizer, texts), strict=True
        ):
            if text.context and len(token_ids) >= text.context:
                too_long.append(
                    f"{example.example_id} with {len(token_ids):,} of {text.context:,} tokens"
                )
            else:
                prompts.append(
                    Prompt(example, rendered, token_ids, tuple(messages_of(example, loaded.data)))
                )
    dropped = (
        dropped_words(len(too_long), "longer than the context", too_long[0]) if too_long else ""
    )
    if not prompts:
        raise ConfigurationError(
            f'[data] source = "{loaded.data.source}" has no usable prompt: {dropped}; take a model'
            " with a longer context, or shorter problems."
        )
    notes = [*loaded.notes]
    if dropped:
        notes.append(f"Dropped prompts: {dropped}")
    lengths = [len(prompt.token_ids) for prompt in prompts]
    if clamped := [
        length for length in lengths if text.context and length + training.max_tokens > text.context
    ]:
        notes.append(
            f"[training] max_tokens = {training.max_tokens} and the prompt exceed the model's"
            f" context of {text.context:,} for {len(clamped):,} of {len(prompts):,} prompts, whose"
            f" completions end at the context (after {text.context - max(clamped):,} tokens or"
            " more)"
        )
    return PromptSet(tuple(prompts), tuple(notes))
