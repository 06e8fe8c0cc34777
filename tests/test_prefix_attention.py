"""Attention of packed rows, as matrix products or by a fused kernel, is plain causal attention of
every row, in values and gradients.
"""

import pytest
import torch
from torch import Tensor

from retrain.model import packing
from retrain.model.attention import FusedAttention
from retrain.model.packing import PackedAttention
from tests.segments import HEADS, KEY_HEADS, SEGMENTS, SIZE, row_by_row

# Two prompts that rows of several lengths continue, one of them by padding, and a row without a
# prompt.
TOKENS = 37


def packed_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, HEADS, TOKENS, SIZE), (1, KEY_HEADS, TOKENS, SIZE), (1, KEY_HEADS, TOKENS, SIZE))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("budget", [8, 30, 1000])
@pytest.mark.parametrize(
    ("scores", "longest"),
    [(1, 512), (1 << 22, 512), (1, 0)],
    ids=["queries in turns", "queries at once", "kernel"],
)
def test_packed_rows_attend_as_single_rows_do(
    budget: int, scores: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_MAX_TOKENS_AS_PRODUCTS", longest)
    monkeypatch.setattr(packing, "_SCORES", scores)
    monkeypatch.setattr(packing, "_MIN_QUERIES", 2)
    inputs = packed_inputs()
    expected = row_by_row(*inputs)
    found = PackedAttention(SEGMENTS, budget, FusedAttention(), torch.device("cpu")).attention(
        *inputs, 0.3, None, None
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for of_found, of_expected in zip(
        torch.autograd.grad(found, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient),
        strict=True,
    ):
        torch.testing.assert_close(of_found, of_expected, rtol=1e-5, atol=1e-5)
