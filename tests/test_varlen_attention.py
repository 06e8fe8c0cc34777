"""Packed rows in one attention call of a layer: the same function as the learner's other attention,
without a mask.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrain.backends.local.learner import Learner, _Weights
from retrain.backends.local.micro_batches import LearnerRow
from retrain.inference_engine.kv_cache import PromptPass
from retrain.model.attention import FusedAttention
from retrain.model.devices import attention_of
from retrain.model.fused import FusedDecoder
from retrain.model.packing import PackedAttention, Segment
from retrain.types import MachineChoices
from tests.fake_device import DEVICE, on_device
from tests.learner_models import config_for, make_rows
from tests.plain_attention import plain
from tests.segments import SEGMENTS

CPU = torch.device("cpu")
ORACLE = FusedAttention(packed=plain, fits=lambda query: True)
LAYOUTS = {
    "shared prompts, ragged, one token": SEGMENTS,
    "whole rows": [Segment(0, 5), Segment(5, 9), Segment(14, 1)],
    "one row behind its prompt": [Segment(0, 30), Segment(30, 60, 0, 30)],
    "prompts alone, and one token behind each": [
        Segment(0, 4),
        Segment(4, 1, 0, 4),
        Segment(5, 0),
        Segment(5, 1),
    ],
}


def inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, tokens, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (6, 2, 2)
    ]


@pytest.mark.parametrize("window", [None, 3, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_call_equals_the_masked_attention_in_values_and_gradients(
    layout: str, window: int | None
) -> None:
    segments = LAYOUTS[layout]
    packed = inputs(segments[-1].stop)
    found, expected = (
        PackedAttention(segments, 1000, kernel, CPU).attention(*packed, 0.3, window, None)
        for kernel in (ORACLE, FusedAttention())
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    pairs = zip(
        torch.autograd.grad(found, packed, gradient),
        torch.autograd.grad(expected, packed, gradient),
        strict=True,
    )
    for of_found, of_expected in pairs:
        torch.testing.assert_close(of_found, of_expected, rtol=1e-10, atol=1e-10)


def test_prompts_of_a_pass_are_one_call() -> None:
    packed = [tensor.detach() for tensor in inputs(14)]
    found, expected = (
        PromptPass([5, 9], kernel).attention(*packed, 0.3, 4, None)
        for kernel in (ORACLE, FusedAttention())
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_soft_cap_takes_the_other_attention() -> None:
    segments, packed = LAYOUTS["whole rows"], inputs(15)
    found, expected = (
        PackedAttention(segments, 1000, kernel, CPU).attention(*packed, 0.3, None, 2.0)
        for kernel in (ORACLE, FusedAttention())
    )
    assert torch.equal(found, expected)


class Calls(TorchDispatchMode):
    """Counts operators, and keeps the largest shape that has two sides as long as the packed
    sequence.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.counts, self.squares = tokens, Counter[str](), list[Sequence[int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[func.__name__.partition(".")[0]] += 1
        for tensor in result if isinstance(result, tuple) else (result,):
            if (
                isinstance(tensor, Tensor)
                and tensor.dim() >= 2
                and min(tensor.shape[-2:]) >= self.tokens
            ):
                self.squares.append(tensor.shape)
        return result


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_learner_attends_once_a_layer_and_builds_no_mask(checkpointing: bool) -> None:
    config = config_for()
    with ExitStack() as stack:
        base, adapter = on_device(config, torch.bfloat16, stack)
        choices = MachineChoices(1, 8, 1024, 1024, checkpointing)
        fused = FusedDecoder(base.model, merge=False)
        learner = Learner(base, adapter, config, choices, fused)
        learner._kernel = attention_of("default", "cuda", torch.bfloat16)
        rows = [
            LearnerRow(number, row, row.logprobs, row.logprobs, row.logprobs)
            for number, row in enumerate(make_rows(longest=80))
        ]
        (piece,) = learner._pieces(rows, share=True)
        with Calls(tokens=100) as calls, warnings.catch_warnings():
            (learned,) = learner._learn(
                replace(piece, step=0, weights=[_Weights(1.0, 1.0)] * len(piece.rows))
            )
        layers = base.model.config.num_hidden_layers
    assert learned.loss.device == DEVICE
    assert calls.counts["_varlen_attn"] == layers * (
        2 if checkpointing else 1
    )  # again where a layer is computed again
    assert calls.counts["_varlen_attn_backward"] == layers
    assert not [
        name
        for name in calls.counts
        if "scaled_dot_product" in name or "masked_fill" in name or name == "_softmax"
    ]
    assert sum(row.tokens for row in piece.rows) > 100 and not calls.squares
