"""Packed sequences' attention in matrix products, which the kernels are compared with."""

from itertools import pairwise

import torch
from torch import Tensor

from retrain.model.varlen import Spans


def plain(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float, window: int | None
) -> Tensor:
    """Attend as `varlen.flash` does, sequence by sequence."""
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for (first, last), (start, stop) in zip(
        pairwise(spans.queries.tolist()), pairwise(spans.keys.tolist()), strict=True
    ):
        q = query[first:last].transpose(0, 1)
        k, v = (
            part[start:stop].transpose(0, 1).repeat_interleave(groups, dim=0)
            for part in (key, value)
        )
        # The queries are the last positions of their keys.
        seen = torch.arange(stop - start, device=query.device)
        own = seen[stop - start - (last - first) :, None]
        hidden = seen > own
        if window is not None:
            hidden |= seen <= own - window
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(hidden, float("-inf"))
        outputs.append((torch.softmax(scores, dim=-1) @ v).transpose(0, 1))
    return torch.cat(outputs)
