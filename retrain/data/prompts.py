"""The examples of a run, for training and for its evaluations, and their prompts. Prompts get their
tokens at first use, in an order that is a pure function of (seed, cursor).
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from retrain import noise
from retrain.config.names import source_task
from retrain.data.chat import count_tokens, encode_texts, messages_of, render_text, token_bounds
from retrain.data.readers import Split
from retrain.data.sources import Query, ReadResult, dropped_words, read_source, source_key
from retrain.errors import ConfigurationError
from retrain.model.text import TextModel
from retrain.types import Example, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from retrain.config.schema import Data, TrainConfig, Training

_CHUNK = 256  # prompts that the search for the longest one encodes at a time
_SUBSET_SEED = 0
"""Seed of the subset that max_examples takes. Every run takes the same subset, spread over the
whole set, since many sources have their examples sorted by subject.
"""


def load_examples(config: "TrainConfig", split: Split = "train") -> ReadResult:
    """Load the training set of `[data]`, cut to `[training] max_examples`, or the whole held-out
    set that `[evaluation] source` names.

    Raises NoHeldOutSplit without held-out examples, another ConfigurationError without any example
    or for an unknown source, and EnvironmentFailure if it cannot reach the hub.
    """
    query = query_of(config, split)
    result = read_source(query)
    if not result.examples:
        details = "; ".join(filter(None, [result.dropped_rows(), *result.notes])) or "it is empty"
        kind = "training" if split == "train" else "held-out"
        raise ConfigurationError(f"{query.key} has no usable {kind} row: {details}.")
    result.examples = subset(
        result.examples, config.training.max_examples if split == "train" else 0
    )
    if result.dropped:
        result.notes.append(f"Dropped rows: {result.dropped_rows()}")
    repeated = len(result.examples) - len({example.example_id for example in result.examples})
    if repeated:
        result.notes.append(
            "Examples that share their example_id with another, so that their results count as"
            f" one: {repeated:,}"
        )
    return result


def of_task(prompts: Iterable[Prompt], source: str) -> list[Prompt]:
    """Return the prompts of an evaluation source among several. The source's name becomes the task,
    which the ids of the examples carry too.
    """
    task = source_task(source)
    return [replace(prompt, example=as_task(prompt.example, task)) for prompt in prompts]


def as_task(example: Example, task: str) -> Example:
    """Return an example of the task `task`, whose id carries the name too."""
    return replace(example, task=task, example_id=f"{task}/{example.example_id}")


def query_of(config: "TrainConfig", split: Split) -> Query:
    """Return the request for the examples of `load_examples`."""
    source, copy = "", ""
    if split == "heldout":
        (source,) = config.evaluation.sources
        copy = config.evaluation.path_of(source)
    apart = source not in ("", config.data.source) or bool(copy)
    data = config.data
    if apart:
        changes = {"source": source or data.source, "path": copy, "params": {}}
        data = data.model_copy(update=changes)
    return Query(config, data, split, named_for_evaluation=apart)


def examples_key(config: "TrainConfig", split: Split) -> tuple[Hashable, ...] | None:
    """Return the values that identify the result of `load_examples`, without reading data; None if
    the user's own code reads it.
    """
    key = source_key(query_of(config, split))
    if key is None:
        return None
    return *key, config.training.max_examples if split == "train" else 0


def subset(examples: list[Example], limit: int) -> list[Example]:
    """Take at most `limit` examples in their order, or all for 0. A larger limit's subset contains
    a smaller limit's subset.
    """
    if not 0 < limit < len(examples):
        return examples
    draws = noise.uniform(_SUBSET_SEED, noise.Stream.DATA_ORDER, 0, 0, 0, np.arange(len(examples)))
    return [examples[index] for index in sorted(np.argsort(draws, kind="stable")[:limit].tolist())]


def contamination_note(train: Iterable[Example], heldout: Iterable[Example]) -> str | None:
    """Return a sentence if a held-out problem is, or begins, a training example, word for word."""
    seen = set(chain.from_iterable(map(_beginnings, train)))
    shared = [example.example_id for example in heldout if _beginnings(example)[-1] in seen]
    if not shared:
        return None
    return (
        f"Held-out problems that are in training too: {len(shared):,}, the first is"
        f" {shared[0]}. Held-out accuracy is too high."
    )


def _beginnings(example: Example) -> list[str]:
    """Return the prompt after each of its messages, with its white space normalized."""
    messages = example.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return [*accumulate(json.dumps([one["role"], one["content"].split()]) for one in messages)]


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
    """The prompts of a run: rendered at its start, encoded when they are first needed.

    The seed and the epoch alone decide the order of each epoch. So all conditions of a seed see the
    same prompts at the same step, and a resume needs only the cursor.
    """

    tokenizer: "PreTrainedTokenizerBase"
    data: "Data"
    examples: tuple[Example, ...]
    texts: tuple[str, ...]
    """The rendered examples."""
    bounds: tuple[int, ...]
    """Maximum number of tokens of each text."""
    notes: list[str]
    """Sentences for the start of the run."""
    _encoded: dict[int, Prompt] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def sha256(self) -> str:
        """The hash of the rendered texts."""
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts in the source's order."""
        return self.at(range(len(self)))

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        order, longest = sorted(range(len(self)), key=self.bounds.__getitem__, reverse=True), 0
        for start in range(0, len(order), _CHUNK):
            chunk = order[start : start + _CHUNK]
            if self.bounds[chunk[0]] <= longest:
                break  # no later text can be longer
            counts = count_tokens(self.tokenizer, [self.texts[index] for index in chunk])
            longest = max(longest, *counts)
        return longest

    def longer_than(self, limit: int) -> int:
        """Return the number of prompts with more than `limit` tokens."""
        if limit <= 0:
            return len(self)
        near = [text for text, bound in zip(self.texts, self.bounds, strict=True) if bound > limit]
        return sum(count > limit for count in count_tokens(self.tokenizer, near))

    def batch(self, cursor: int, count: int, seed: int) -> list[Prompt]:
        """Return prompts cursor .. cursor + count - 1, counted from the start of the run over all
        epochs.
        """
        return self.at(self.order(cursor, count, seed))

    def order(self, cursor: int, count: int, seed: int) -> list[int]:
        """Return the indices of the prompts that `batch` takes."""
        size = len(self)
        places = range(cursor, cursor + count)
        return [int(epoch_order(seed, i // size, size)[i % size]) for i in places]

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        """Return the prompts of these examples."""
        new = [index for index in dict.fromkeys(indices) if index not in self._encoded]
        rows = encode_texts(self.tokenizer, [self.texts[index] for index in new])
        for index, token_ids in zip(new, rows, strict=True):
            example = self.examples[index]
            messages = tuple(messages_of(example, self.data))
            self._encoded[index] = Prompt(example, self.texts[index], token_ids, messages)
        return [self._encoded[index] for index in indices]

    @property
    def fingerprint(self) -> str:
        """sha256 over example ids, prompts and references, in the source's order."""
        return fingerprint(self.examples)


@dataclass(frozen=True)
class MixedPrompts(PromptSet):
    """The prompts of several sources, one source after the other."""

    sets: tuple[PromptSet, ...] = ()

    @classmethod
    def of(cls, sets: Sequence[PromptSet]) -> "MixedPrompts":
        return cls(
            sets[0].tokenizer,
            sets[0].data,
            tuple(chain.from_iterable(each.examples for each in sets)),
            tuple(chain.from_iterable(each.texts for each in sets)),
            tuple(chain.from_iterable(each.bounds for each in sets)),
            notes=[],
            sets=tuple(sets),
        )

    @cached_property
    def starts(self) -> list[int]:
        """The index of each source's first prompt."""
        return [0, *accumulate(map(len, self.sets[:-1]))]

    def order(self, cursor: int, count: int, seed: int) -> list[int]:
        """Return the indices of the first prompts of every source in turn, for the gate.
        `data.mixing` chooses the prompts of the steps.
        """
        rounds = [divmod(place, len(self.sets)) for place in range(cursor, cursor + count)]
        return [self.starts[n] + self.sets[n].order(turn, 1, seed)[0] for turn, n in rounds]

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        places = [(bisect_right(self.starts, index) - 1, index) for index in indices]
        return [self.sets[own].at([index - self.starts[own]])[0] for own, index in places]


@lru_cache(maxsize=16)
def epoch_order(
    seed: int, epoch: int, size: int, stream: noise.Stream = noise.Stream.DATA_ORDER
) -> npt.NDArray[np.intp]:
    """Return the permutation of one epoch, [size], from the ranks of counter-based uniforms."""
    draws = noise.uniform(seed, stream, epoch, 0, 0, np.arange(size))
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False  # it is cached
    return order


def encode_prompts(training: "Training", text: TextModel, loaded: ReadResult) -> PromptSet:
    """Render every example. It encodes prompts that may reach the end of the context now, and the
    others at their first use.

    It drops a prompt that leaves no room for a token in the model's context. A completion has
    `[training] max_tokens`, or the rest of the context if that is less. Raises ConfigurationError
    if no prompt fits.
    """
    tokenizer, context, examples = text.tokenizer, text.context, loaded.examples
    texts = [render_text(tokenizer, example, loaded.data) for example in examples]
    bounds = token_bounds(tokenizer, texts)
    lengths = _too_long(text, texts, bounds)
    kept = [index for index in range(len(texts)) if index not in lengths]
    dropped = ""
    if lengths:
        first, length = next(iter(lengths.items()))
        words = f"{examples[first].example_id} with {length:,} of {context:,} tokens"
        dropped = dropped_words(len(lengths), "longer than the context", words)
    if not kept:
        raise ConfigurationError(
            f'[data] source = "{loaded.data.source}" has no usable prompt ({dropped}); take a'
            " model with a longer context, or shorter problems."
        )
    prompts = PromptSet(
        tokenizer,
        loaded.data,
        tuple(examples[index] for index in kept),
        tuple(texts[index] for index in kept),
        tuple(bounds[index] for index in kept),
        [*loaded.notes],
    )
    if dropped:
        prompts.notes.append(f"Dropped prompts: {dropped}")
    # These prompts stay, with shorter completions; one note says so.
    clamped = prompts.longer_than(context - training.max_tokens)
    if clamped:
        prompts.notes.append(
            f"[training] max_tokens = {training.max_tokens} exceeds the model's context of"
            f" {context:,} for {clamped:,} of {len(prompts):,} prompts, so their completions end"
            f" after {context - prompts.longest:,} tokens or more"
        )
    return prompts


def _too_long(text: TextModel, texts: Sequence[str], bounds: Sequence[int]) -> dict[int, int]:
    """Return index -> number of tokens of every prompt that fills the context."""
    near = [index for index, bound in enumerate(bounds) if text.context <= bound]
    counts = count_tokens(text.tokenizer, [texts[index] for index in near])
    return {i: count for i, count in zip(near, counts, strict=True) if count >= text.context}
