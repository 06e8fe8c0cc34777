"""The same model in another precision, to measure how rounding changes this model's log-probs.

The module converts the base weights of one layer at a time, so the other precision fits wherever
the model itself fits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from retrain.model.load import BaseModel, layers

Saved = list[tuple[nn.Parameter, Tensor]]


def other_precision(base: BaseModel) -> torch.dtype | None:
    """Return bf16 for a base that computes in float32, float32 for one in half precision; None for
    a base in parts.
    """
    if base.shards.size > 1:
        return None
    return torch.bfloat16 if base.dtype == torch.float32 else torch.float32


@contextmanager
def computed_in(
    base: BaseModel, dtype: torch.dtype, beside: Sequence[nn.Parameter]
) -> Iterator[BaseModel]:
    """Yield `base` with its hidden states and its head in `dtype`.

    Parameters `beside` the model's own do not change. Weights in 8 or 4 bits do not change either,
    but their scales do. A conversion follows the look-up of embeddings, which gives the same values
    and needs no second table.
    """
    apart = set(map(id, beside))
    embedding, blocks = base.model.get_input_embeddings(), layers(base.decoder)
    inside = set(chain.from_iterable(block.modules() for block in blocks))
    inside.add(embedding)
    # Outside of the blocks a module converts its own weights alone: those inside it are units too.
    units = [*blocks, *(module for module in base.decoder.modules() if module not in inside)]
    hooks = [embedding.register_forward_hook(lambda *called: called[-1].to(dtype))]
    for unit in units:
        weights = [
            weight
            for weight in unit.parameters(recurse=unit in blocks)
            if weight.dtype == base.dtype and id(weight) not in apart
        ]
        hooks += _converted(unit, weights, dtype) if weights else []
    head, bias = base.head, base.head.bias
    if bias is not None:
        bias = bias.to(dtype)
    try:
        yield replace(
            base, head=replace(head, weight=head.weight.to(dtype), bias=bias), dtype=dtype
        )
    finally:
        for hook in hooks:
            hook.remove()


def _converted(module: nn.Module, weights: list[nn.Parameter], dtype: torch.dtype) -> list[Any]:
    """Hooks that convert `weights` while `module` runs."""
    saved: Saved = []

    def convert(*_: object) -> None:
        for weight in weights:
            saved.append((weight, weight.data))
            weight.data = weight.data.to(dtype)

    def restore(*_: object) -> None:
        while saved:
            weight, data = saved.pop()
            weight.data = data

    return [
        module.register_forward_pre_hook(convert),
        module.register_forward_hook(restore, always_call=True),
    ]
