"""From logits to a token, its log-prob and the entropy, with one reading of the vocabulary and one
of the block that the token is in.

What is drawn is defined in `inference_engine/sampling.py`, and what is kept in `truncation.py`.
Within a block, weights and their sum are float32; sums over blocks and within the block of the
token are float64. All sums have a fixed order. Shape letters: R rows, V vocabulary, N blocks of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_SMALLEST = tl.constexpr(-87.0)
"""Below it a weight is 0: the logarithm of the smallest normal float32."""
_FLOOR = tl.constexpr(-1e4)
"""Stands for everything below, so that these tokens are equal to one another."""
_FLOOR_BITS = tl.constexpr(0x461C4000)


@triton.jit
def _scaled(logits, row_stride, row, at, inside, divisor):
    """z = logits / temperature of a row, rounded like the learner's."""
    z = tl.load(logits + row * row_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.div_rn(z, divisor)


@triton.jit
def _divisor(temperatures, row):
    temperature = tl.load(temperatures + row)
    return tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def _depth(z, most):
    """The distance of z below the largest, as an integer of the same order: the bits of a float32
    >= 0.
    """
    below = z - most
    below = tl.where(below <= _SMALLEST, _FLOOR, below)
    return below.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _block_sums(
    logits, temperatures, tops, cuts, largest, sums, moments, row_stride, vocabulary, blocks,
    CUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the largest z of one block, the sum of w = exp(z - largest), and the sum of w (z -
    largest), over the kept tokens.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    z = _scaled(logits, row_stride, row, at, inside, _divisor(temperatures, row))
    most = tl.max(z, axis=0)
    # NaN stays NaN, and the row's sum with it.
    below = tl.where(z == float("-inf"), _FLOOR, z - most)
    weight = tl.where(below <= _SMALLEST, 0.0, tl.exp(below))
    if CUT:
        depth, last, bound = (
            _depth(z, tl.load(tops + row)),
            tl.load(cuts + 2 * row),
            tl.load(cuts + 2 * row + 1),
        )
        weight = tl.where(
            (depth > last) | ((depth == last) & (at > bound)), tl.where(z != z, z, 0.0), weight
        )
    else:
        tl.store(largest + row * blocks + block, most)
    place = row * blocks + block
    tl.store(sums + place, tl.sum(weight, axis=0))
    tl.store(moments + place, tl.sum(tl.where(weight > 0, weight * below, 0.0), axis=0))


@triton.jit
def _first(at, cumulative, weight, target, end):
    """The first place whose cumulative weight reaches the target, of those with a weight; where
    rounding steps past the end, the last.
    """
    reached = tl.min(tl.where((cumulative >= target) & (weight > 0), at, end), axis=0)
    return tl.where(reached == end, tl.max(tl.where(weight > 0, at, 0), axis=0), reached)


@triton.jit
def _pick(
    logits, temperatures, uniforms, cuts, kept, largest, sums, moments, out, row_stride, vocabulary,
    blocks,
    CUT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: token, log-prob, entropy and tokens kept to out [R, 4]."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCKS)
    there = number < blocks
    most_of = tl.load(largest + row * blocks + number, mask=there, other=float("-inf"))
    sum_of = tl.load(sums + row * blocks + number, mask=there, other=0.0)
    moment_of = tl.load(moments + row * blocks + number, mask=there, other=0.0)
    most = tl.max(most_of, axis=0)
    below = most_of - most
    factor = tl.exp(tl.where(below > _SMALLEST, below, _SMALLEST).to(tl.float64))
    # A block with NaN keeps its weight, however small: NaN has to reach the log-prob.
    weight = tl.where((below > _SMALLEST) | (sum_of != sum_of), sum_of.to(tl.float64) * factor, 0.0)
    moment = tl.sum(
        tl.where(
            weight > 0,
            factor * (moment_of.to(tl.float64) + below.to(tl.float64) * sum_of.to(tl.float64)),
            0.0,
        ),
        axis=0,
    )
    total = tl.sum(weight, axis=0)
    target = tl.load(uniforms + row) * total
    block = _first(number, tl.cumsum(weight, axis=0), weight, target, BLOCKS)
    rest = target - tl.sum(tl.where(number < block, weight, 0.0), axis=0)

    temperature, divisor = tl.load(temperatures + row), _divisor(temperatures, row)
    if temperature == 0:
        block = tl.min(tl.where((most_of == most) & there, number, BLOCKS - 1), axis=0)
        block = tl.minimum(block, blocks - 1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    z = _scaled(logits, row_stride, row, at, at < vocabulary, divisor)
    inner = tl.where(z - most > _SMALLEST, tl.exp(z - most), 0.0)
    if CUT:
        depth, last, bound = _depth(z, most), tl.load(cuts + 2 * row), tl.load(cuts + 2 * row + 1)
        inner = tl.where((depth > last) | ((depth == last) & (at > bound)), 0.0, inner)
    inner = inner.to(tl.float64)
    within = tl.arange(0, BLOCK)
    if temperature == 0:
        place = tl.min(tl.where(z == most, within, BLOCK - 1), axis=0)
    else:
        place = _first(within, tl.cumsum(inner, axis=0), inner, rest, BLOCK)
    token = tl.minimum(block * BLOCK + place, vocabulary - 1)

    log_total = tl.log(total)
    logprob = tl.sum(tl.where(within == place, (z - most).to(tl.float64), 0.0), axis=0) - log_total
    entropy = log_total - moment / total
    entropy = tl.where(entropy < 0, 0.0, entropy)
    if temperature == 0:  # certain, unless the numbers are not finite
        finite = (logprob - logprob) == 0
        logprob, entropy = tl.where(finite, 0.0, logprob), tl.where(finite, 0.0, entropy)
    tl.store(out + 4 * row, token.to(tl.float64))
    tl.store(out + 4 * row + 1, logprob)
    tl.store(out + 4 * row + 2, entropy)
    if CUT:
        tl.store(out + 4 * row + 3, tl.load(kept + row).to(tl.float64))


@triton.jit
def _up_to(logits, row_stride, row, divisor, most, depth, vocabulary, BLOCK: tl.constexpr):
    """Number of tokens up to a depth, and their weight in float64."""
    count, mass = most.to(tl.int32) * 0, most.to(tl.float64) * 0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < vocabulary
        z = _scaled(logits, row_stride, row, at, inside, divisor)
        taken = inside & (_depth(z, most) <= depth)
        count += tl.sum(taken.to(tl.int32), axis=0)
        weight = tl.where(taken & (z - most > _SMALLEST), tl.exp(z - most), 0.0)
        mass += tl.sum(weight.to(tl.float64), axis=0)
    return count, mass


@triton.jit
def _shallowest(
    logits,
    row_stride,
    row,
    divisor,
    most,
    wanted_count,
    wanted_mass,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """The smallest depth up to which there are so many tokens of so much weight; number and weight
    before it, and of the tokens at it.
    """
    low, high = wanted_count * 0 - 1, wanted_count * 0 + _FLOOR_BITS
    # A depth has 31 bits, so as many halvings find it.
    for _ in range(31):
        middle = low + (high - low) // 2
        count, mass = _up_to(logits, row_stride, row, divisor, most, middle, vocabulary, BLOCK)
        enough = (count >= wanted_count) & (mass >= wanted_mass)
        low, high = tl.where(enough, low, middle), tl.where(enough, middle, high)
    count, mass = _up_to(logits, row_stride, row, divisor, most, high, vocabulary, BLOCK)
    count_before, mass_before = _up_to(
        logits, row_stride, row, divisor, most, high - 1, vocabulary, BLOCK
    )
    return high, count_before, mass_before, tl.maximum(count - count_before, 1), mass - mass_before


@triton.jit
def _cut(
    logits, temperatures, top_k, top_p, min_p, largest, tops, cuts, kept, row_stride, vocabulary,
    blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kept set of one row: how many tokens, and to cuts [R, 2] the depth of the last one and
    the last id of that depth.

    The depth is found by bisection instead of in a sorted vocabulary: 31 readings of the row, which
    stays in the cache, for each cut that is on and for all of them together.
    """
    row = tl.program_id(0).to(tl.int64)
    divisor = _divisor(temperatures, row)
    number = tl.arange(0, BLOCKS)
    most = tl.max(
        tl.load(largest + row * blocks + number, mask=number < blocks, other=float("-inf")), axis=0
    )
    k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    # `x * 0 + y` is y in the type of x: a branch may not change the type of a variable.
    none = most.to(tl.float64) * 0
    count = k.to(tl.int32) * 0 + vocabulary
    weightless = tl.where(none == none, none, 0.0)
    total = weightless
    if k > 0:
        count = tl.minimum(k, vocabulary).to(tl.int32)
    if p < 1:
        _, total = _up_to(
            logits, row_stride, row, divisor, most, count * 0 + _FLOOR_BITS, vocabulary, BLOCK
        )
        if count < vocabulary:
            _, before, mass, ties, tied = _shallowest(
                logits, row_stride, row, divisor, most, count, weightless, vocabulary, BLOCK
            )
            total = mass + tied * ((count - before).to(tl.float64) / ties.to(tl.float64))
        target = p * total
        _, before, mass, ties, tied = _shallowest(
            logits, row_stride, row, divisor, most, count * 0, target, vocabulary, BLOCK
        )
        needed = tl.ceil((target - mass) * ties.to(tl.float64) / tl.where(tied > 0, tied, 1.0)).to(
            tl.int32
        )
        count = tl.minimum(count, before + tl.maximum(needed, 1))
    if m > 0:
        least, above = tl.log(m), count * 0
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _scaled(logits, row_stride, row, at, at < vocabulary, divisor)
            above += tl.sum(
                (((z - most).to(tl.float64) >= least) & (at < vocabulary)).to(tl.int32), axis=0
            )
        count = tl.minimum(count, above)
    count = tl.maximum(count, 1)

    depth, bound = count * 0 + _FLOOR_BITS, count * 0 + vocabulary
    if count < vocabulary:
        depth, before, _, _, _ = _shallowest(
            logits, row_stride, row, divisor, most, count, weightless, vocabulary, BLOCK
        )
        places, seen, bound = count - before, count * 0, count * 0 - 1
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            equal = (at < vocabulary) & (
                _depth(_scaled(logits, row_stride, row, at, at < vocabulary, divisor), most)
                == depth
            )
            order = seen + tl.cumsum(equal.to(tl.int32), axis=0)
            bound = tl.maximum(bound, tl.max(tl.where(equal & (order <= places), at, -1), axis=0))
            seen += tl.sum(equal.to(tl.int32), axis=0)
    tl.store(tops + row, most)
    tl.store(cuts + 2 * row, depth)
    tl.store(cuts + 2 * row + 1, bound)
    tl.store(kept + row, count)


def draw(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    cuts: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """[R, 4] float64 of logits [R, V]: token, log-prob, entropy, tokens kept (0 without cuts).

    `temperatures` [R] float32, 0 is greedy; `uniforms` [R] float64; `cuts`: top_k, top_p and min_p,
    [R] each.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, _BLOCK)
    sizes = {"BLOCKS": triton.next_power_of_2(blocks), "BLOCK": _BLOCK}
    largest, sums, moments = logits.new_empty((3, rows, blocks), dtype=torch.float32)
    tops, last, kept = (
        logits.new_empty(rows, dtype=torch.float32),
        *(logits.new_empty(rows, n, dtype=torch.int32) for n in (2, 1)),
    )
    out = logits.new_zeros((rows, 4), dtype=torch.float64)
    stride = logits.stride(0)

    def sum_blocks(cut: bool) -> None:
        of_blocks = tops, last, largest, sums, moments, stride, vocabulary, blocks
        _block_sums[rows, blocks](logits, temperatures, *of_blocks, CUT=cut, BLOCK=_BLOCK)

    # A cut is relative to the largest z of a row, so what it leaves is summed in a second reading.
    sum_blocks(False)
    if cuts is not None:
        _cut[rows,](
            logits,
            temperatures,
            *cuts,
            largest,
            tops,
            last,
            kept,
            stride,
            vocabulary,
            blocks,
            **sizes,
            num_warps=8,
        )
        sum_blocks(True)
    _pick[rows,](
        logits,
        temperatures,
        uniforms,
        last,
        kept,
        largest,
        sums,
        moments,
        out,
        stride,
        vocabulary,
        blocks,
        CUT=cuts is not None,
        **sizes,
    )
    return out
