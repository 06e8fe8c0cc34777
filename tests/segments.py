"""Segments of a packed sequence, and their attention row by row."""

import torch
import torch.nn.functional as F
from torch import Tensor

from retrain.model.packing import Segment

HEADS, KEY_HEADS, SIZE = 6, 2, 8


SEGMENTS = [
    Segment(0, 5),
    Segment(5, 7, 0, 5),
    Segment(12, 4, 0, 5),
    Segment(16, 1, 0, 5),
    Segment(17, 5),
    Segment(22, 6, 17, 5),
    Segment(28, 9),
]


def row_by_row(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each segment's queries over its prompt and itself, the keys repeated for the heads that share
    them.
    """
    parts = []
    for segment in SEGMENTS:
        before = range(segment.prompt_start, segment.prompt_start + segment.prompt_length)
        seen = [*before, *range(segment.start, segment.stop)]
        visible = torch.ones(segment.length, len(seen)).tril_(segment.prompt_length).bool()
        keys, values = (
            tensor[:, :, seen].repeat_interleave(HEADS // KEY_HEADS, dim=1)
            for tensor in (key, value)
        )
        queries = query[:, :, segment.start : segment.stop]
        parts.append(
            F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=0.3)
        )
    return torch.cat(parts, dim=2)
