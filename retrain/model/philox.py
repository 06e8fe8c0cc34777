"""Philox4x32-10 on torch tensors: the bits of `retrain.noise.philox`, computed where they are needed.

int64 holds the unsigned products: the low 64 bits wrap right, and masking after the shift drops the copied sign.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(seed: int, stream: int, counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor]) -> Tensor:
    """[..., 4] int64 words in [0, 2**32), one block of four per broadcast element of the counter."""
    last = counter[3]
    words = [torch.as_tensor(word, dtype=torch.int64, device=last.device) & _MASK for word in counter]
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


def uniform_words(seed: int, stream: int, a: Tensor | int, b: Tensor | int, c: Tensor | int, count: int, device: torch.device) -> Tensor:
    """[..., count] words: element i is word i % 4 of the block with counter (a, b, c, i // 4)."""
    blocks = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    words = philox(seed, stream, (a, b, c, blocks))
    return words.flatten(-2)[..., :count]
