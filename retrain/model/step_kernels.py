"""The operations of a decoding step between its matrix products and its attention, in torch's
operators or in Triton kernels.

Triton is taken on CUDA where it compiles and agrees with torch on a probe. Both round where
transformers' operators do: the residual sum, the normed value before and after its weight, the
product with the cosine, the activation; between these, and in sums, they are float32. Shape
letters: N rows with one token each, H hidden size, Q and K query and key-value heads, D head size,
R ranks, O outputs.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from retrain.model.functions import Norm, apply_rope, gated, normed
from retrain.model.packed import quantised, scaled_product
from retrain.model.probe import Make, choose, compare, numbers
from retrain.model.projection import LoraTerm
from retrain.model.varlen import PagedRows, plain_paged

TRITON_DEVICES = {"cuda"}
_MAX_NARROW_ROWS = 256
"""Rows up to which Triton's product with 8-bit weights is taken; for more, the weight is widened
once for all of them."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference of a kernel on the probe, whose numbers are about 1: two roundings apart."""

_PAGE_TOKENS, _ROW_PAGES = 64, 17
"""Tokens of a page, and pages of a row: more than one part of a row (`kernels/attention.py`)."""

Cuts = tuple[Tensor, Tensor, Tensor]
"""top_k, top_p, min_p of rows."""


Draw = Callable[[Tensor, Tensor, Tensor, Cuts | None], Tensor]
"""(logits [N, V], temperatures [N], uniforms [N], cuts) to [N, 4] token, log-prob, entropy, tokens
kept."""


class StepKernels:
    """The operations in torch's operators: the reference of every kernel."""

    draw: Draw | None = None
    """Draws tokens; None leaves that to the sampler's own function."""
    attend = staticmethod(plain_paged)
    """Attention over pages."""
    scaled_product = staticmethod(scaled_product)

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        """The normed sum [N, H] of `residual` [N, H], which becomes the sum, and `update` [N,
        H].
        """
        return normed(residual if update is None else residual.add_(update), norm)

    def apply_rope_and_store_kv(
        self,
        qkv: Tensor,
        pending: LoraTerm | None,
        heads: Sequence[int],
        rotary: tuple[Tensor, Tensor],
        norm: Norm | None,
        pages: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
    ) -> Tensor:
        """Queries [N, Q, D] of [N, (Q + 2 K) D], to which `pending` is added, normed and rotated by
        cos and sin [N, 1, D]; keys and values [K, D] of each row go to the tokens `slot_mapping`
        [N] of `pages`, which are [P, T, K, D].
        """
        queries, keys = heads[:2]
        fused = _added(qkv, pending).view(len(qkv), -1, pages[0].shape[-1])
        rotated = apply_rope(fused[:, : queries + keys], *rotary, norm)
        for stored, new in zip(
            pages, (rotated[:, queries:], fused[:, queries + keys :]), strict=True
        ):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, slot_mapping, new)
        return rotated[:, :queries]

    def gate(self, gates: Tensor, pending: LoraTerm | None) -> Tensor:
        """silu(gate) * up [N, I] of both side by side, after `pending` is added."""
        return gated(_added(gates, pending), None)


def _added(y: Tensor, pending: LoraTerm | None) -> Tensor:
    """`y` [N, O] with the adapter's part, if it is still to be added."""
    if pending is None:
        return y
    return pending.added_to(y)


class TritonKernels(StepKernels):
    """One kernel each, and two for a draw, four where it is truncated."""

    def __init__(self) -> None:
        from retrain.model.kernels import attention, products, rowwise, sampler

        self.gate, self.draw = rowwise.gate, sampler.draw  # type: ignore[method-assign]
        self._attend, self._narrow_product = attention.attend, products.scaled_product
        self._add_norm = rowwise.add_norm
        self._apply_rope_and_store_kv = rowwise.apply_rope_and_store_kv

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        return self._add_norm(residual, update, norm.weight, norm.eps)

    def apply_rope_and_store_kv(
        self,
        qkv: Tensor,
        pending: LoraTerm | None,
        heads: Sequence[int],
        rotary: tuple[Tensor, Tensor],
        norm: Norm | None,
        pages: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
    ) -> Tensor:
        return self._apply_rope_and_store_kv(
            qkv,
            pending,
            heads,
            rotary,
            None if norm is None else (norm.weight, norm.eps),
            pages,
            slot_mapping,
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: PagedRows,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        return self._attend(
            query, keys, values, rows.block_table, rows.cache_seqlens, scaling, window
        )

    def scaled_product(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        product = self._narrow_product if len(x) <= _MAX_NARROW_ROWS else scaled_product
        return product(x, weight, scale, bias)


class Heads(NamedTuple):
    """Numbers of query and key-value heads, and their size."""

    queries: int
    keys: int
    size: int


_SMALL = Heads(4, 2, 8)


def step_kernels(
    device: torch.device,
    dtype: torch.dtype,
    log: Callable[[str], None],
    heads: Heads = _SMALL,
    *,
    narrow: bool = False,
) -> StepKernels:
    """Return the kernels of `device` for a model with these `heads`; `narrow`: its weights are in 8
    bits. `log` receives a line saying why Triton's were not taken on a device that has them.
    """
    if device.type not in TRITON_DEVICES:
        return StepKernels()
    if importlib.util.find_spec("triton") is None:
        log(
            "Decoding uses torch's operators: the package triton, which joins them in fewer"
            " kernels, is not installed."
        )
        return StepKernels()
    kernels: TritonKernels | None
    kernels, reason = choose(
        TritonKernels, partial(differences, device=device, dtype=dtype, heads=heads, narrow=narrow)
    )
    if kernels is None:
        log(f"Decoding uses torch's operators: {reason}.")
        return StepKernels()
    return kernels


Case = Callable[[StepKernels], list[Tensor]]
"""The results of one kernel."""


@torch.no_grad()
def differences(
    kernels: StepKernels,
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads = _SMALL,
    *,
    narrow: bool = False,
) -> list[str]:
    """Name the kernels that differ from torch's operators on a probe by more than rounding;
    `narrow` tries products in 8 bits too.
    """
    make = numbers(device, dtype)
    wrong = compare(StepKernels(), kernels, _cases(make, heads, narrow=narrow), _TOLERANCE)
    if kernels.draw is not None and not _draws_right(kernels.draw, make(3, 5000)):
        wrong.append("draw")
    return wrong


def _cases(make: Make, heads: Heads, *, narrow: bool) -> dict[str, Case]:
    """Return a case for each kernel of a decoding step. The model's own `heads` decide whether a
    kernel fits the shared memory of this GPU; `narrow` adds products in 8 bits.
    """
    width = (heads.queries + 2 * heads.keys) * heads.size
    qkv, pending = make(3, width + 6)[:, :width], LoraTerm(make(3, 6), make(6, width))
    cases = {
        "add_norm": _add_norm_case(make),
        "apply_rope_and_store_kv": _rope_case(make, heads, qkv, pending),
        "gate": lambda kernels: [kernels.gate(qkv.clone(), pending)],
        "attend": _attention_case(make, heads),
    }
    return cases | ({"scaled_product": _product_case(make)} if narrow else {})


def _add_norm_case(make: Make) -> Case:
    residual, update, norm = make(3, 40), make(3, 48)[:, :40], Norm(make(40), 1e-6)

    def case(kernels: StepKernels) -> list[Tensor]:
        total = residual.clone()
        return [kernels.add_norm(total, update, norm), total]

    return case


def _rope_case(make: Make, heads: Heads, qkv: Tensor, pending: LoraTerm) -> Case:
    queries, keys, size = heads
    rotary, norm = (make(3, 1, size), make(3, 1, size)), Norm(make(queries + keys, size), 1e-6)
    slot_mapping = torch.tensor([5, 0, 7], device=qkv.device)

    def case(kernels: StepKernels) -> list[Tensor]:
        pages = qkv.new_zeros(3, 4, keys, size), qkv.new_zeros(3, 4, keys, size)
        rotated = kernels.apply_rope_and_store_kv(
            qkv.clone(), pending, (queries, keys, keys), rotary, norm, pages, slot_mapping
        )
        return [rotated, *pages]

    return case


def _attention_case(make: Make, heads: Heads) -> Case:
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


def _product_case(make: Make) -> Case:
    x, (weight, scale), bias = make(3, 48)[:, :40], quantised(make(21, 40) / 8), make(21)
    return lambda kernels: [kernels.scaled_product(x, weight, scale, bias)]


def _draws_right(draw: Draw, logits: Tensor) -> bool:
    """Return True if draws from `logits` [N, V], N = 3, at half of the distribution have the token
    and log-prob that they should: of everything, and of sets that top_k, top_p and min_p keep.
    """
    rows, vocabulary = logits.shape
    ones = torch.ones(rows, device=logits.device)
    halves = 0.5 * ones.double()
    falling = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(falling.values, dim=-1)
    # row 0 is cut by top_k, row 1 by top_p, row 2 by min_p
    top_k = torch.tensor([7, 0, 0], device=logits.device)
    top_p, min_p = (torch.tensor(cut).to(halves) for cut in ([1.0, 0.5, 1.0], [0.0, 0.0, 0.2]))
    kept = [
        7,
        int((probabilities[1].cumsum(0) < 0.5).sum()) + 1,
        int((probabilities[2] >= 0.2 * probabilities[2, 0]).sum()),
    ]
    truncated = draw(logits, ones, halves, (top_k, top_p, min_p)).double()
    for row, found in enumerate(truncated.tolist()):
        # a sum of probabilities may round to the other side
        if abs(found[3] - kept[row]) > 1:
            return False
        ids = falling.indices[row, : int(found[3])].sort().values
        if not _is_half(logits[row], ids, found):
            return False
    whole = draw(logits, ones, halves, None).double().tolist()
    ids = torch.arange(vocabulary, device=logits.device)
    return all(_is_half(logits[row], ids, found) for row, found in enumerate(whole))


def _is_half(logits: Tensor, ids: Tensor, drawn: Sequence[float]) -> bool:
    """Return True if `drawn` (token, log-prob, ..) is where the sum of the probabilities of `ids`,
    in their order, passes a half.
    """
    logprobs = torch.log_softmax(logits.double()[ids], dim=0)
    place = (ids == int(drawn[0])).nonzero()
    if not len(place) or abs(float(logprobs[place[0, 0]]) - drawn[1]) > 1e-4:
        return False
    own, below = logprobs.exp()[place[0, 0]], logprobs.exp()[: place[0, 0] + 1].sum()
    return 0.4999 < float(below) < 0.5001 + float(own)
