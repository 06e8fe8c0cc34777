"""LoRA dropout whose masks are a function of (seed, step, row, layer, position, feature).

A mask depends on nothing else, so it is the same in whatever micro-batch a row lands, in a
recomputed forward pass, and after a resume. Outside a training pass the module does nothing: the
sampler, the parity gate and `logprobs` never see dropout.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from retrain.noise import Stream

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(
    seed: int, stream: int, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor]
) -> Tensor:
    """[..., 4] int64 words in [0, 2**32), one block of four per broadcast element of the
    counter.
    """
    last = counter[3]
    words = [
        torch.as_tensor(word, dtype=torch.int64, device=last.device) & _MASK for word in counter
    ]
    # torch does not annotate broadcast_tensors.
    x0, x1, x2, x3 = torch.broadcast_tensors(*words)  # type: ignore[no-untyped-call]
    key0, key1 = seed & _MASK, int(stream) & _MASK
    for _ in range(10):
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((product1 >> 32) & _MASK) ^ x1 ^ key0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ x3 ^ key1,
            product0 & _MASK,
        )
        key0, key1 = (key0 + _KEY_STEPS[0]) & _MASK, (key1 + _KEY_STEPS[1]) & _MASK
    return torch.stack([x0, x1, x2, x3], dim=-1)


def uniform_words(
    seed: int,
    stream: int,
    a: Tensor | int,
    b: Tensor | int,
    c: Tensor | int,
    count: int,
    device: torch.device,
) -> Tensor:
    """[..., count] words: element i is word i % 4 of the block with counter (a, b, c, i // 4)."""
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    words = philox(seed, stream, (a, b, c, blocks))
    return words.flatten(-2)[..., :count]


class DropoutKey:
    """The coordinates of the current forward pass's masks; shared by all layers, inactive by
    default.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.rows: Tensor | None = None
        """[batch] row numbers of the micro-batch; None switches dropout off."""
        self.lengths: Sequence[int] | None = None
        """Tokens of each row where they are packed into one sequence; None where they are padded to
        one length."""

    @property
    def is_active(self) -> bool:
        return self.rows is not None

    @contextmanager
    def active(
        self,
        step: int,
        rows: Sequence[int],
        device: torch.device,
        lengths: Sequence[int] | None = None,
    ) -> Iterator[None]:
        """Switch dropout on inside. The backward pass belongs inside too: gradient checkpointing
        runs the forward again.
        """
        self.step, self.rows, self.lengths = (
            step,
            torch.tensor(rows, dtype=torch.int64, device=device),
            lengths,
        )
        try:
            yield
        finally:
            self.rows = None


class KeyedDropout(nn.Module):
    def __init__(self, rate: float, layer: int, key: DropoutKey) -> None:
        super().__init__()
        self.rate, self.layer, self.key = rate, layer, key
        self.threshold = round(rate * 2**32)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, positions, features], or [1, all positions, features] of packed rows; a row
        starts with its first token.
        """
        if not self.key.is_active:
            return x
        lengths = self.key.lengths
        keep = self.keep_mask(max(lengths) if lengths else x.shape[1], x.shape[2])
        if lengths:
            keep = torch.cat(
                [mask[:length] for mask, length in zip(keep, lengths, strict=True)]
            ).unsqueeze(0)
        return x * (keep.to(x.dtype) / (1 - self.rate))

    def keep_mask(self, positions: int, features: int) -> Tensor:
        """[batch, positions, features] of bool."""
        rows = self.key.rows
        if rows is None:
            raise ValueError("dropout masks exist only inside DropoutKey.active")
        words = uniform_words(
            self.key.seed,
            Stream.DROPOUT,
            self.key.step,
            rows.unsqueeze(-1),
            self.layer,
            positions * features,
            rows.device,
        )
        return words.view(len(rows), positions, features) >= self.threshold

    def extra_repr(self) -> str:
        return f"rate={self.rate}, layer={self.layer}"
