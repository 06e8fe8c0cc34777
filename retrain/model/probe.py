"""Compare kernels with their reference before they are used, on one small case for each kernel.

Numbers of a case are about 1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Kernels = TypeVar("Kernels")
Make = Callable[..., Tensor]
"""Returns normal numbers of the given shape."""


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
