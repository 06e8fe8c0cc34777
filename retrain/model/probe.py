"""Compare kernels with their reference before they are used, on one small case for each kernel.

Numbers of a case are about 1. Shape letters as in `retrain/model/step_kernels.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from retrain.model.float8 import quantised
from retrain.model.functions import Norm
from retrain.model.projection import Pending
from retrain.model.varlen import PagedRows

if TYPE_CHECKING:
    from retrain.model.step_kernels import Draw, Heads, StepKernels

Kernels = TypeVar("Kernels")
Make = Callable[..., Tensor]
"""Returns normal numbers of the given shape."""

_PAGE_TOKENS, _ROW_PAGES = 64, 17
"""Tokens of a page, and pages of a row: more than one part of a row (`kernels/attention.py`)."""


def choose(
    build: Callable[[], Kernels], probe: Callable[[Kernels], list[str]]
) -> tuple[Kernels | None, str]:
    """Return (kernels, "") of `build`, or (None, the reason) where they fail or `probe` names some
    that differ.
    """
    try:
        kernels = build()
        wrong = probe(kernels)
    except Exception as error:  # noqa: BLE001 - a compiler that is missing, or too old, is named in its own words
        return (
            None,
            f"Triton's kernels do not compile here ({type(error).__name__}: {str(error)[:200]})",
        )
    if wrong:
        return None, f"on a probe Triton's kernels differ from them ({', '.join(wrong)})"
    return kernels, ""


def compare(
    reference: Kernels,
    candidate: Kernels,
    cases: Mapping[str, Callable[[Kernels], Sequence[Tensor]]],
    tolerance: Mapping[torch.dtype, float],
) -> list[str]:
    """Name the cases whose results differ by more than the `tolerance` of their dtype."""

    def agree(found: Tensor, expected: Tensor) -> bool:
        limit = tolerance[found.dtype]
        return torch.allclose(found.float(), expected.float(), rtol=limit, atol=limit)

    return [
        name
        for name, case in cases.items()
        if not all(map(agree, case(candidate), case(reference)))
    ]


def numbers(device: torch.device, dtype: torch.dtype) -> Make:
    """Return a function that makes the same normal numbers in every process."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)


def step_cases(
    make: Make, heads: "Heads", *, narrow: bool
) -> "dict[str, Callable[[StepKernels], list[Tensor]]]":
    """Return a case for each kernel of a decoding step. The model's own `heads` decide whether a
    kernel fits the shared memory of this GPU; `narrow` adds products in 8 bits.
    """
    width = (heads.queries + 2 * heads.keys) * heads.size
    qkv, pending = make(3, width + 6)[:, :width], Pending(make(3, 6), make(6, width))
    cases = {
        "add_norm": _add_norm_case(make),
        "apply_rope_and_store_kv": _rope_case(make, heads, qkv, pending),
        "gate": lambda kernels: [kernels.gate(qkv.clone(), pending)],
        "attend": _attention_case(make, heads),
    }
    return cases | ({"scaled_product": _product_case(make)} if narrow else {})


def _add_norm_case(make: Make) -> "Callable[[StepKernels], list[Tensor]]":
    residual, update, norm = make(3, 40), make(3, 48)[:, :40], Norm.of(make(40), 1e-6)

    def case(kernels: "StepKernels") -> list[Tensor]:
        total = residual.clone()
        return [kernels.add_norm(total, update, norm), total]

    return case


def _rope_case(
    make: Make, heads: "Heads", qkv: Tensor, pending: Pending
) -> "Callable[[StepKernels], list[Tensor]]":
    queries, keys, size = heads
    rotary, norm = (make(3, 1, size), make(3, 1, size)), Norm.of(make(queries + keys, size), 1e-6)
    slot_mapping = torch.tensor([5, 0, 7], device=qkv.device)

    def case(kernels: "StepKernels") -> list[Tensor]:
        pages = qkv.new_zeros(3, 4, keys, size), qkv.new_zeros(3, 4, keys, size)
        rotated = kernels.apply_rope_and_store_kv(
            qkv.clone(), pending, (queries, keys, keys), rotary, norm, pages, slot_mapping
        )
        return [rotated, *pages]

    return case


def _attention_case(make: Make, heads: "Heads") -> "Callable[[StepKernels], list[Tensor]]":
    """Rows that end before a page's end, in the first page and in the second."""
    queries, keys, size = heads
    query = make(3, queries + keys, size)[:, :queries]
    pages = make(5, _PAGE_TOKENS, keys, size), make(5, _PAGE_TOKENS, keys, size)
    order = torch.arange(3 * _ROW_PAGES, device=query.device, dtype=torch.int32)
    cache_seqlens = [_PAGE_TOKENS * _ROW_PAGES - 1, 1, _PAGE_TOKENS + 6]
    rows = PagedRows.of(
        order.view(3, _ROW_PAGES).flip(1) % 5,
        torch.tensor(cache_seqlens, device=query.device, dtype=torch.int32),
        _PAGE_TOKENS,
    )
    return lambda kernels: [
        kernels.attend(query, *pages, rows, size**-0.5, window) for window in (None, 3)
    ]


def _product_case(make: Make) -> "Callable[[StepKernels], list[Tensor]]":
    x, (weight, scale), bias = make(3, 48)[:, :40], quantised(make(21, 40) / 8), make(21)
    return lambda kernels: [kernels.scaled_product(x, weight, scale, bias)]


def draws_right(draw: "Draw", logits: Tensor) -> bool:
    """Return whether draws from `logits` [N, V], N = 3, at half of the distribution have the token
    and log-prob that they should: of everything, and of sets that top_k, top_p and min_p keep.
    """
    rows, vocabulary = logits.shape
    ones = torch.ones(rows, device=logits.device)
    halves = torch.full((rows,), 0.5, device=logits.device, dtype=torch.float64)
    falling = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(falling.values, dim=-1)
    top_k, top_p, min_p = [7, 0, 0], [1.0, 0.5, 1.0], [0.0, 0.0, 0.2]
    kept = [
        7,
        int((probabilities[1].cumsum(0) < 0.5).sum()) + 1,
        int((probabilities[2] >= 0.2 * probabilities[2, 0]).sum()),
    ]
    cuts = torch.tensor(top_k, device=logits.device), halves.new_tensor(top_p)
    truncated = draw(logits, ones, halves, (*cuts, halves.new_tensor(min_p))).double()
    for row, found in enumerate(truncated.tolist()):
        # a sum of probabilities may round to the other side
        if abs(found[3] - kept[row]) > 1:
            return False
        ids = falling.indices[row, : int(found[3])].sort().values
        if not _is_half(logits[row], ids, found):
            return False
    whole, ids = draw(logits, ones, halves, None).double(), torch.arange(vocabulary)
    return all(
        _is_half(logits[row], ids.to(logits.device), found)
        for row, found in enumerate(whole.tolist())
    )


def _is_half(logits: Tensor, ids: Tensor, drawn: Sequence[float]) -> bool:
    """Return whether `drawn` (token, log-prob, ..) is where the sum of the probabilities of `ids`,
    in their order, passes a half.
    """
    logprobs = torch.log_softmax(logits.double()[ids], dim=0)
    place = (ids == int(drawn[0])).nonzero()
    if not len(place) or abs(float(logprobs[place[0, 0]]) - drawn[1]) > 1e-4:
        return False
    own, below = logprobs.exp()[place[0, 0]], logprobs.exp()[: place[0, 0] + 1].sum()
    return 0.4999 < float(below) < 0.5001 + float(own)
