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
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.model.float8 import quantised, scaled_product
from retrain.model.functions import Norm, normed, rotate
from retrain.model.projection import Pending
from retrain.model.varlen import PagedKernel, PagedRows, plain_paged

TRITON_DEVICES = {"cuda"}
_MOST_NARROW_ROWS = 256
"""Rows up to which Triton's product with 8-bit weights is taken; for more, the weight is widened
once for all of them."""
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference of a kernel on the probe, whose numbers are about 1: two roundings apart."""

_PAGE, _PAGES = 64, 17
"""Tokens of a page on the probe, and pages of its rows: more than one part of a row
(`kernels/attention.py`)."""

Made = TypeVar("Made")

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

    def turn_and_store(
        self,
        qkv: Tensor,
        pending: Pending | None,
        heads: Sequence[int],
        rotary: tuple[Tensor, Tensor],
        norm: Norm | None,
        pages: tuple[Tensor, Tensor],
        places: Tensor,
    ) -> Tensor:
        """Queries [N, Q, D] of [N, (Q + 2 K) D], to which `pending` is added, normed and turned by
        cos and sin [N, 1, D]; keys and values [K, D] of each row go to `places` [N] of `pages`,
        which are [P, T, K, D].
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

    def turn_and_store(
        self,
        qkv: Tensor,
        pending: Pending | None,
        heads: Sequence[int],
        rotary: tuple[Tensor, Tensor],
        norm: Norm | None,
        pages: tuple[Tensor, Tensor],
        places: Tensor,
    ) -> Tensor:
        queries, keys = heads[:2]
        fused = (qkv if pending is None else pending.added_to(qkv)).view(
            len(qkv), -1, pages[0].shape[-1]
        )
        turned = rotate(fused[:, : queries + keys], *rotary, norm)
        for stored, new in zip(
            pages, (turned[:, queries:], fused[:, queries + keys :]), strict=True
        ):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, places, new)
        return turned[:, :queries]

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
        self._add_norm, self._turn_and_store = (
            norm.add_norm,
            rotary.turn_and_store,
        )

    def add_norm(self, residual: Tensor, update: Tensor | None, norm: Norm) -> Tensor:
        return self._add_norm(residual, update, norm.weight, norm.eps)

    def turn_and_store(
        self,
        qkv: Tensor,
        pending: Pending | None,
        heads: Sequence[int],
        rotary: tuple[Tensor, Tensor],
        norm: Norm | None,
        pages: tuple[Tensor, Tensor],
        places: Tensor,
    ) -> Tensor:
        return self._turn_and_store(
            qkv,
            pending,
            heads,
            rotary,
            None if norm is None else (norm.weight, norm.eps),
            pages,
            places,
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
        return self._attend(query, keys, values, rows.table, rows.lengths, scaling, window)

    def scaled_product(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
    ) -> Tensor:
        product = self._narrow_product if len(x) <= _MOST_NARROW_ROWS else scaled_product
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
    kernels, reason = tried(
        TritonKernels, partial(differences, device=device, dtype=dtype, heads=heads, narrow=narrow)
    )
    if kernels is None:
        say(f"Decoding uses torch's operators: {reason}.")
        return TorchKernels()
    return kernels


def tried(make: Callable[[], Made], probe: Callable[[Made], list[str]]) -> tuple[Made | None, str]:
    """(kernels, "") of `make`, or (None, the reason) where they fail or `probe` names
    differences.
    """
    try:
        kernels = make()
        wrong = probe(kernels)
    except Exception as error:  # noqa: BLE001 - a compiler that is missing, or too old, is named in its own words
        return (
            None,
            f"Triton's kernels do not compile here ({type(error).__name__}: {str(error)[:200]})",
        )
    return (
        (None, f"on a probe Triton's kernels differ from them ({', '.join(wrong)})")
        if wrong
        else (kernels, "")
    )


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

    Its `heads` are the model's: they decide whether a kernel fits the shared memory of this GPU.
    """
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    queries, keys, size = heads
    wide = (queries + 2 * keys) * size
    residual, update, qkv, rotary = (
        make(3, 40),
        make(3, 48)[:, :40],
        make(3, wide + 6)[:, :wide],
        (make(3, 1, size), make(3, 1, size)),
    )
    norm, head_norm = Norm.of(make(40), 1e-6), Norm.of(make(queries + keys, size), 1e-6)
    places, pending = torch.tensor([5, 0, 7], device=device), Pending(make(3, 6), make(6, wide))
    table = torch.arange(3 * _PAGES, device=device, dtype=torch.int32).view(3, _PAGES).flip(1) % 5
    lengths = torch.tensor([_PAGE * _PAGES - 1, 1, _PAGE + 6], device=device, dtype=torch.int32)
    rows, asked = PagedRows.of(table, lengths, _PAGE), make(3, queries + keys, size)[:, :queries]
    kept = make(5, _PAGE, keys, size), make(5, _PAGE, keys, size)
    (weight, scale), bias = quantised(make(21, 40) / 8), make(21)

    def results(of: StepKernels) -> dict[str, list[Tensor]]:
        pages, total = (
            (make(3, 4, keys, size).zero_(), make(3, 4, keys, size).zero_()),
            residual.clone(),
        )
        normed_sum = of.add_norm(total, update, norm)
        turned = of.turn_and_store(
            qkv.clone(), pending, (queries, keys, keys), rotary, head_norm, pages, places
        )
        return {
            "add_norm": [total, normed_sum],
            "turn_and_store": [turned, *pages],
            "gate": [of.gate(qkv.clone(), pending)],
            "attend": [of.attend(asked, *kept, rows, size**-0.5, window) for window in (None, 3)],
            "scaled_product": [of.scaled_product(update, weight, scale, bias)] if narrow else [],
        }

    found, expected = results(kernels), results(TorchKernels())
    wrong = []
    for name, values in found.items():
        limits = [_TOLERANCE[own.dtype] for own in values]
        checked = zip(values, expected[name], limits, strict=True)
        if not all(
            torch.allclose(own.float(), other.float(), rtol=limit, atol=limit)
            for own, other, limit in checked
        ):
            wrong.append(name)
    if kernels.draw is not None and not _draws_right(kernels.draw, make(3, 5000)):
        wrong.append("draw")
    return wrong


def _draws_right(draw: Draw, logits: Tensor) -> bool:
    """Return whether draws at half of the distribution, of everything and of the rows' kept sets,
    have the token and log-prob that they should.
    """
    count, vocabulary = logits.shape
    ones, halves = (
        torch.ones(count, device=logits.device),
        torch.full((count,), 0.5, device=logits.device, dtype=torch.float64),
    )
    falling = torch.sort(logits.double(), dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(falling.values, dim=-1)
    top_k, top_p, min_p = (
        torch.tensor([7, 0, 0]),
        torch.tensor([1.0, 0.5, 1.0]),
        torch.tensor([0.0, 0.0, 0.2]),
    )
    cut = [
        7,
        int((probabilities[1].cumsum(0) < 0.5).sum()) + 1,
        int((probabilities[2] >= 0.2 * probabilities[2, 0]).sum()),
    ]
    cuts = top_k.to(logits.device), top_p.to(halves), min_p.to(halves)
    for kept, drawn in (
        ([vocabulary] * count, draw(logits, ones, halves, None)),
        (cut, draw(logits, ones, halves, cuts)),
    ):
        for row, (size, (token, logprob, _, told)) in enumerate(
            zip(kept, drawn.double().tolist(), strict=True)
        ):
            if (
                size < vocabulary and abs(told - size) > 1
            ):  # a sum of probabilities may round to the other side
                return False
            ids = falling.indices[row, : int(told) if size < vocabulary else size].sort().values
            own = torch.log_softmax(logits[row].double()[ids], dim=0)
            place = (ids == int(token)).nonzero()
            if not len(place) or abs(float(own[place[0, 0]]) - logprob) > 1e-4:
                return False
            below = float(own.exp()[: place[0, 0] + 1].sum())
            if not 0.4999 < below < 0.5001 + float(own.exp()[place[0, 0]]):
                return False
    return True
