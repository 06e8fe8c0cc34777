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
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.model.float8 import scaled_product
from retrain.model.functions import Norm, apply_rope, normed
from retrain.model.probe import choose, compare, draws_right, numbers, step_cases
from retrain.model.projection import Pending
from retrain.model.varlen import PagedKernel, PagedRows, plain_paged

TRITON_DEVICES = {"cuda"}
_MAX_NARROW_ROWS = 256
"""Rows up to which Triton's product with 8-bit weights is taken; for more, the weight is widened
once for all of them."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference of a kernel on the probe, whose numbers are about 1: two roundings apart."""

Cuts = tuple[Tensor, Tensor, Tensor]
"""top_k, top_p, min_p of rows."""


Draw = Callable[[Tensor, Tensor, Tensor, Cuts | None], Tensor]
"""(logits [N, V], temperatures [N], uniforms [N], cuts) to [N, 4] token, log-prob, entropy, tokens
kept."""


class StepKernels(Protocol):
    def add_norm(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        """The normed sum [N, H] of `residual` [N, H], which becomes the sum, and `update` [N,
        H].
        """
        ...

    def apply_rope_and_store_kv(
        self,
        qkv: Tensor,
        pending: Pending | None,
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
        ...

    def gate(self, gates: Tensor, pending: Pending | None) -> Tensor:
        """silu(gate) * up [N, I] of both side by side, to which `pending` is added."""
        ...

    def scaled_product(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        """[N, O] of x [N, I] and a weight [O, I] in 8 bits whose outputs have scales [O, 1]."""
        ...

    @property
    def attend(self) -> PagedKernel:
        """Attention over pages."""
        ...

    @property
    def draw(self) -> Draw | None:
        """Draws tokens; None leaves that to the sampler's own function."""
        ...


class TorchKernels:
    """The reference of every kernel."""

    draw = None
    attend = staticmethod(plain_paged)

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        return normed(residual if update is None else residual.add_(update), norm)

    def apply_rope_and_store_kv(
        self,
        qkv: Tensor,
        pending: Pending | None,
        heads: Sequence[int],
        rotary: tuple[Tensor, Tensor],
        norm: Norm | None,
        pages: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
    ) -> Tensor:
        queries, keys = heads[:2]
        fused = (qkv if pending is None else pending.added_to(qkv)).view(
            len(qkv), -1, pages[0].shape[-1]
        )
        rotated = apply_rope(fused[:, : queries + keys], *rotary, norm)
        for stored, new in zip(
            pages, (rotated[:, queries:], fused[:, queries + keys :]), strict=True
        ):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, slot_mapping, new)
        return rotated[:, :queries]

    def gate(self, gates: Tensor, pending: Pending | None) -> Tensor:
        gate, up = (gates if pending is None else pending.added_to(gates)).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def scaled_product(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        return scaled_product(x, weight, scale, bias)


class TritonKernels:
    """One kernel each, and two for a draw, four where it is truncated."""

    def __init__(self) -> None:
        from retrain.model.kernels import (
            activation,
            attention,
            float8,
            norm,
            rotary,
            sampler,
        )

        self.gate, self.draw = activation.gate, sampler.draw
        self._attend, self._narrow_product = attention.attend, float8.scaled_product
        self._add_norm, self._apply_rope_and_store_kv = (
            norm.add_norm,
            rotary.apply_rope_and_store_kv,
        )

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        return self._add_norm(residual, update, norm.weight, norm.eps)

    def apply_rope_and_store_kv(
        self,
        qkv: Tensor,
        pending: Pending | None,
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
    say: Callable[[str], None],
    heads: Heads = _SMALL,
    *,
    narrow: bool = False,
) -> StepKernels:
    """Return the kernels of `device` for a model with these `heads`; `narrow`: its weights are in 8
    bits. `say` is told in a line why Triton's were not taken on a device that has them.
    """
    if device.type not in TRITON_DEVICES:
        return TorchKernels()
    if importlib.util.find_spec("triton") is None:
        say(
            "Decoding uses torch's operators: the package triton, which joins them in fewer"
            " kernels, is not installed."
        )
        return TorchKernels()
    kernels: TritonKernels | None
    kernels, reason = choose(
        TritonKernels, partial(differences, device=device, dtype=dtype, heads=heads, narrow=narrow)
    )
    if kernels is None:
        say(f"Decoding uses torch's operators: {reason}.")
        return TorchKernels()
    return kernels


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
    wrong = compare(TorchKernels(), kernels, step_cases(make, heads, narrow=narrow), _TOLERANCE)
    if kernels.draw is not None and not draws_right(kernels.draw, make(3, 5000)):
        wrong.append("draw")
    return wrong
