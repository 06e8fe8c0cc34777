"""Prompts, encoded once, in an order that is a pure function of (seed, cursor)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from retrain import noise
from retrain.data.chat import encode_texts, messages_of, render_text
from retrain.data.load import fingerprint
from retrain.data.sources import ReadResult, dropped_words
from retrain.errors import ConfigurationError
from retrain.model.text import TextModel
from retrain.types import Prompt

if TYPE_CHECKING:
    from retrain.config.schema import Training

_CHUNK = 2_048  # prompts that the tokenizer encodes in one call, in parallel threads


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run. Each epoch is shuffled anew by the seed and the epoch alone, so all conditions of one seed see the same
    prompts at the same step, and resuming needs only the cursor.
    """

    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()
    """Sentences for the start of the run."""

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, cursor: int, count: int, seed: int) -> list[Prompt]:
        """Return prompts cursor .. cursor + count - 1, counted from the start of the run over all epochs."""
        size = len(self.prompts)
        return [self.prompts[epoch_order(seed, place // size, size)[place % size]] for place in range(cursor, cursor + count)]

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

    A prompt that leaves no room for a token in the model's context is dropped. A completion has `[training] max_tokens`, or the rest
    of the context if that is less. Raises ConfigurationError if no prompt fits.
    """
    too_long: list[str] = []
    prompts: list[Prompt] = []
    for start in range(0, len(loaded), _CHUNK):
        examples = loaded.examples[start : start + _CHUNK]
        texts = [render_text(text.tokenizer, example, loaded.data) for example in examples]
        for example, rendered, token_ids in zip(examples, texts, encode_texts(text.tokenizer, texts), strict=True):
            if text.context and len(token_ids) >= text.context:
                too_long.append(f"{example.example_id} with {len(token_ids):,} of {text.context:,} tokens")
            else:
                prompts.append(Prompt(example, rendered, token_ids, tuple(messages_of(example, loaded.data))))
    dropped = dropped_words(len(too_long), "longer than the context", too_long[0]) if too_long else ""
    if not prompts:
        raise ConfigurationError(
            f'[data] source = "{loaded.data.source}" has no usable prompt: {dropped}; take a model with a longer context, or shorter '
            "problems."
        )
    notes = [*loaded.notes]
    if dropped:
        notes.append(f"Dropped prompts: {dropped}")
    lengths = [len(prompt.token_ids) for prompt in prompts]
    if clamped := [length for length in lengths if text.context and length + training.max_tokens > text.context]:
        notes.append(
            f"[training] max_tokens = {training.max_tokens} and the prompt exceed the model's context of {text.context:,} for "
            f"{len(clamped):,} of {len(prompts):,} prompts, whose completions end at the context (after "
            f"{text.context - max(clamped):,} tokens or more)"
        )
    return PromptSet(tuple(prompts), tuple(notes))
