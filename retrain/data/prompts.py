"""Prompts, encoded once, in an order that is a pure function of (seed, cursor)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from retrain import noise
from retrain.data.chat import encode_texts, render_text
from retrain.data.load import LoadedExamples, fingerprint
from retrain.data.sources import Harvest, Reason
from retrain.errors import ConfigurationError
from retrain.model.text import TextModel
from retrain.types import Prompt

if TYPE_CHECKING:
    from retrain.config.schema import TrainConfig

_CHUNK = 2_048  # prompts that the tokenizer encodes in one call, in parallel threads


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run. The order is shuffled anew in each epoch, by the seed and the epoch alone, so every condition of one seed
    sees the same prompts at the same step, and resuming needs only the cursor.
    """

    prompts: tuple[Prompt, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows and examples that became no prompt, by reason."""
    notes: tuple[str, ...] = ()
    """Sentences for the run's log."""

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, cursor: int, count: int, seed: int) -> list[Prompt]:
        """The prompts number cursor .. cursor + count - 1 since the start of the run, over as many epochs as that takes."""
        size = len(self.prompts)
        return [self.prompts[epoch_order(seed, place // size, size)[place % size]] for place in range(cursor, cursor + count)]

    @property
    def fingerprint(self) -> str:
        """sha256 over example ids, prompts and references, in the source's order."""
        return fingerprint(prompt.example for prompt in self.prompts)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> npt.NDArray[np.intp]:
    """[size] the permutation of one epoch: the ranks of counter-based uniforms."""
    draws = noise.uniform(seed, noise.Stream.DATA_ORDER, epoch, 0, 0, np.arange(size))
    order = np.argsort(draws, kind="stable")
    order.flags.writeable = False  # it is cached
    return order


def encode_prompts(config: "TrainConfig", text: TextModel, loaded: LoadedExamples) -> PromptSet:
    """Render and encode every example once.

    A prompt must leave room for one token at least in the model's context, else it is dropped; a completion then has
    `[training] max_tokens` or what is left of the context, whichever is less.
    Raises ConfigurationError if no prompt fits.
    """
    harvest = Harvest(dropped=dict(loaded.dropped))
    prompts: list[Prompt] = []
    for start in range(0, len(loaded.examples), _CHUNK):
        examples = loaded.examples[start : start + _CHUNK]
        texts = [render_text(text.tokenizer, example, loaded.data) for example in examples]
        for example, rendered, token_ids in zip(examples, texts, encode_texts(text.tokenizer, texts), strict=True):
            if text.context and len(token_ids) >= text.context:
                harvest.drop(Reason.TOO_LONG, f"{example.example_id} with {len(token_ids):,} of {text.context:,} tokens")
            else:
                prompts.append(Prompt(example, rendered, token_ids))
    too_long = harvest.dropped_notes()
    if not prompts:
        raise ConfigurationError(
            f'[data] source = "{loaded.data.source}": {"; ".join(too_long)}, so no prompt is left; '
            "take a model with a longer context, or shorter problems."
        )
    clamped = _clamp_note(prompts, text.context, config.training.max_tokens)
    return PromptSet(tuple(prompts), harvest.dropped, (*loaded.notes, *too_long, *clamped))


def _clamp_note(prompts: Sequence[Prompt], context: int, max_tokens: int) -> list[str]:
    clamped = [len(prompt.token_ids) for prompt in prompts if context and len(prompt.token_ids) + max_tokens > context]
    if not clamped:
        return []
    return [
        (
            f"[training] max_tokens = {max_tokens} and the prompt exceed the model's context of {context:,} for {len(clamped):,} of "
            f"{len(prompts):,} prompts, whose completions end at the context (after {context - max(clamped):,} tokens or more)"
        )
    ]
