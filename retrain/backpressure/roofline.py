"""The roofline: whether a step is bound by arithmetic or by memory. It is a hint; nothing acts on it.

Source: Williams et al. 2009, doi 10.1145/1498765.1498785.
"""

from dataclasses import dataclass
from typing import Literal

Bound = Literal["compute_bound", "memory_bound"]


@dataclass(frozen=True)
class Roofline:
    bound: Bound
    intensity: float
    """FLOP per byte moved."""
    ridge: float
    """The intensity above which arithmetic is the limit."""
    attained_gflops: float
    """GFLOP/s."""
    utilization: float
    """`attained_gflops` as a fraction of what the hardware can reach at this intensity."""


def step_flops(num_parameters: int, tokens_decoded: int, tokens_trained: int, per_trained_token: float = 6.0) -> float:
    """2 N FLOP per token of a forward pass and `per_trained_token` N per trained one: 6 where all weights have gradients."""
    return num_parameters * (2.0 * tokens_decoded + per_trained_token * tokens_trained)


def roofline(flops: float, num_bytes: float, seconds: float, peak_gflops: float, peak_bw_gb_s: float) -> Roofline | None:
    """The roofline of a step with `flops` and `num_bytes` of memory traffic. None if a peak is 0, which means unknown.

    Raises ValueError unless bytes and seconds are above 0.
    """
    if not (num_bytes > 0 and seconds > 0):
        raise ValueError(f"a step takes time and moves bytes, got {seconds} s and {num_bytes} bytes")
    if peak_gflops <= 0 or peak_bw_gb_s <= 0:
        return None
    intensity, ridge = flops / num_bytes, peak_gflops / peak_bw_gb_s
    attained = flops / seconds / 1e9
    return Roofline(
        bound="compute_bound" if intensity >= ridge else "memory_bound",
        intensity=intensity,
        ridge=ridge,
        attained_gflops=attained,
        utilization=attained / min(peak_gflops, intensity * peak_bw_gb_s) if flops else 0.0,
    )
