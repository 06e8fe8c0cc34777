"""Log-probs and entropies of action tokens from hidden states, without ever holding [tokens,
vocabulary].

The head runs over rows of hidden states in chunks of a fixed number of bytes. With a frozen weight,
only the hidden state has a gradient. For a scalar per row that gradient is one vector of size H.
The forward pass computes it while it holds the row's logits, so backward is a multiplication. The
head keeps no logits and computes them once. A trained head keeps no logits either: its backward
computes each chunk again, and adds up the gradient of the weight.

For a truncated distribution, the row's softmax runs over the kept tokens alone (`truncation.py`).
These are the sampled token and the most probable others, as many as the sampler kept. The gradient
treats the set as a constant.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from retrain.model.packed import dense_product
from retrain.model.truncation import KeptSets, TruncationSettings, keep_only

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bytes of one fp32 tensor [chunk rows, vocabulary], by device; a handful of them live at a time.
A GPU needs so many rows, else reading the head takes longer than the product."""
_LOG_SMALLEST, _SMALLEST = -87.0, 2e-38
"""The smallest normal float32 is 1.2e-38, whose logarithm is -87.3."""


def chunk_bytes_on(device_type: str) -> int:
    return CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"])


@dataclass(frozen=True)
class Head:
    """The language-model head and what the model does to its logits."""

    weight: Tensor
    """[V, H]; the embedding matrix if the model ties the two."""
    bias: Tensor | None = None
    """[V]"""
    scale: float = 1.0
    """Factor on the logits (Cohere's logit_scale, one over Granite's logits_scaling)."""
    softcap: float | None = None
    """softcap * tanh(logits / softcap), after the scale (Gemma)."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [rows, V] logits of [rows, H] hidden states in float32; the product itself runs in
        the model's dtype, as the model's own does.

        `out` [rows, V], of the model's dtype, is memory that the product may use.
        """
        logits = dense_product(hidden, self.weight, self.bias, out).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


class TokenScores(NamedTuple):
    logprobs: Tensor
    """[N] float32, natural log."""
    entropies: Tensor | None
    """[N] float32, nats; None without `entropy`."""


def chunk_rows(vocabulary: int, chunk_bytes: int) -> int:
    """Count the rows of hidden states whose fp32 logits fit in `chunk_bytes`; at least one."""
    return max(1, chunk_bytes // (4 * vocabulary))


def score_tokens(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    kept: Tensor | None = None,
    entropy: bool = False,
    entropy_gradient: bool = True,
    chunk_bytes: int | None = None,
) -> TokenScores:
    """Return log-probs of `targets` [N] under softmax(logits / temperature) of `hidden` [N, H], and
    the entropies if wanted.

    `kept` [N] int64, on the device, is the number of tokens that each softmax runs over; None means
    the whole vocabulary. Softmax runs in float32. Gradient flows to `hidden`, and to a trained
    head. It flows from the entropies if `entropy_gradient` is True.
    """
    if temperature <= 0:
        raise ValueError(f"the learner's temperature must be above 0, not {temperature}")
    rows = chunk_rows(head.weight.shape[0], chunk_bytes or chunk_bytes_on(hidden.device.type))
    settings = _Settings(head, targets, kept, temperature, rows, entropy, entropy_gradient)
    trained = head.weight.requires_grad and torch.is_grad_enabled()
    function: Any = _TrainedHead if trained else _ChunkedHead
    given = (head.weight, head.bias) if trained else ()
    logprobs, entropies = function.apply(hidden, settings, *given)
    return TokenScores(logprobs, entropies if entropy else None)


def count_kept(
    head: Head, hidden: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Return [N] float32 counts of the tokens that the cuts keep of softmax(logits / temperature),
    for `hidden` [N, H].
    """
    rows, counts = chunk_rows(len(head.weight), chunk_bytes_on(hidden.device.type)), []
    # Memory for one chunk after the other: new memory costs page faults.
    products = hidden.new_empty(min(rows, len(hidden)), len(head.weight))
    for part in torch.split(hidden, rows):
        z = head.logits(part, products[: len(part)]).div_(temperature)
        z.sub_(z.amax(-1, keepdim=True))
        total = z.exp().sum(-1, dtype=torch.float64)
        each = TruncationSettings(
            torch.full_like(total, top_k, dtype=torch.int64),
            torch.full_like(total, top_p),
            torch.full_like(total, min_p),
        )
        counts.append(KeptSets.of_cuts(z, total, each).counts)
    return torch.cat(counts).float()


@dataclass(frozen=True)
class _Settings:
    """Everything that scores the rows of a head, except their hidden states."""

    head: Head
    targets: Tensor
    kept: Tensor | None
    temperature: float
    rows: int
    """Rows of a chunk."""
    entropy: bool
    entropy_gradient: bool

    def chunks(self, hidden: Tensor) -> "Iterator[tuple[slice, _Chunk]]":
        """Yield each chunk of the rows of `hidden` [N, H], which holds until the next one."""
        count = len(hidden)
        # Memory for one chunk after the other: new memory costs page faults.
        products = hidden.new_empty(min(self.rows, count), self.head.weight.shape[0])
        for start in range(0, count, self.rows):
            part = slice(start, min(start + self.rows, count))
            yield (
                part,
                _Chunk(
                    self.head,
                    hidden[part],
                    self.targets[part],
                    None if self.kept is None else self.kept[part],
                    self.temperature,
                    products[: part.stop - start],
                    entropy=self.entropy,
                ),
            )

    def empty_scores(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for log-probs and entropies."""
        count = len(hidden)
        return (
            hidden.new_empty(count, dtype=torch.float32),
            hidden.new_empty(count * self.entropy, dtype=torch.float32),
        )


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
        wants_gradient, entropy = ctx.needs_input_grad[0], settings.entropy
        logprobs, entropies = settings.empty_scores(hidden)
        logprob_gradient = torch.empty_like(hidden) if wants_gradient else None
        entropy_gradient = None
        if wants_gradient and entropy and settings.entropy_gradient:
            entropy_gradient = torch.empty_like(hidden)
        for part, chunk in settings.chunks(hidden):
            logprobs[part] = chunk.logprobs
            if entropy:
                entropies[part] = chunk.entropies()
            if logprob_gradient is not None:
                if entropy_gradient is not None:
                    entropy_gradient[part] = chunk.to_hidden(chunk.entropy_slope())
                logprob_gradient[part] = chunk.to_hidden(chunk.logprob_slope())
            del chunk  # before the next chunk
        ctx.save_for_backward(logprob_gradient, entropy_gradient)
        if entropy_gradient is None:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_factor: Tensor, entropy_factor: Tensor
    ) -> tuple[Tensor | None, None]:
        logprob_gradient, entropy_gradient = ctx.saved_tensors
        gradient = logprob_factor.unsqueeze(-1) * logprob_gradient
        if entropy_gradient is not None:
            gradient = gradient + entropy_factor.unsqueeze(-1) * entropy_gradient
        return gradient.to(logprob_gradient.dtype), None


class _TrainedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, settings: _Settings, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = settings.empty_scores(hidden)
        for part, chunk in settings.chunks(hidden):
            logprobs[part] = chunk.logprobs
            if settings.entropy:
                entropies[part] = chunk.entropies()
            del chunk
        # Save the weights too, so that torch refuses a backward pass after a write to them.
        ctx.save_for_backward(hidden, weight, bias)
        ctx.settings = settings
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_factor: Tensor, entropy_factor: Tensor
    ) -> tuple[Tensor, None, Tensor, Tensor | None]:
        hidden, weight, bias = ctx.saved_tensors
        settings: _Settings = ctx.settings
        hidden_gradient = torch.empty_like(hidden)
        gradients = [weight.new_zeros(weight.shape, dtype=torch.float32)]
        if bias is not None:
            gradients.append(bias.new_zeros(bias.shape, dtype=torch.float32))
        for part, chunk in settings.chunks(hidden):
            slope: Tensor | float = 0.0
            if settings.entropy and settings.entropy_gradient:
                slope = chunk.entropy_slope() * entropy_factor[part].unsqueeze(-1)
            slope = chunk.logprob_slope().mul_(logprob_factor[part].unsqueeze(-1)) + slope
            hidden_gradient[part] = chunk.to_hidden(slope)
            logits = chunk.to_logits(slope)
            gradients[0] += logits.T @ hidden[part]
            if bias is not None:
                gradients[1] += logits.sum(0, dtype=torch.float32)
            del chunk, slope, logits
        scale = settings.head.scale / settings.temperature
        scaled = [found.mul_(scale).to(weight.dtype) for found in gradients]
        return hidden_gradient, None, scaled[0], scaled[1] if bias is not None else None


class _Chunk:
    """Some rows of the head, in as few tensors of [rows, V] as possible. One suffices, plus one
    each for entropies and for a soft cap.

    Let u = z / T - max(z / T) and s = sum(exp u). Then p = exp(u) / s, log p = u - log s, and H =
    log s - sum(p u), a sum without negative terms. Slopes: d log p_target / d z = (onehot - p) / T,
    and dH / d z = -p * (log p + H) / T. Dropped tokens have p = 0.
    """

    def __init__(
        self,
        head: Head,
        hidden: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        temperature: float,
        products: Tensor,
        *,
        entropy: bool,
    ) -> None:
        """`products` [rows, V] is memory, which the chunk makes its own."""
        self.head, self.targets, self.temperature = head, targets, temperature
        logits = head.logits(hidden, products)
        # The next operations work in place, and the slope of the cap needs the capped logits.
        self.capped = logits.clone() if head.softcap is not None else None
        u = logits
        if temperature != 1.0:
            u.div_(temperature)
        if kept is not None:
            keep_only(u, targets, kept)
        u.sub_(u.amax(-1, keepdim=True))
        # The exponentials overwrite u, which an entropy reads once more.
        self._u = u.clone() if entropy else None
        of_target = u.gather(-1, targets.unsqueeze(-1))
        self._weights = exponentials(u, out=u)
        """[rows, V] exp u, until a gradient overwrites it."""
        self._total = self._weights.sum(-1, keepdim=True)
        self.logprobs = (of_target - self._total.log()).squeeze(-1)

    def entropies(self) -> Tensor:
        """Return [rows] nats; p = 0 adds nothing."""
        assert self._u is not None
        terms = torch.where(self._weights > 0, self._weights * self._u, 0.0).sum(-1, keepdim=True)
        return (self._total.log() - terms / self._total).squeeze(-1)

    def entropy_slope(self) -> Tensor:
        """Return [rows, V], the entropies' gradient with respect to logits / T."""
        assert self._u is not None
        shift = self.entropies().unsqueeze(-1) - self._total.log()
        gradient = -self._weights / self._total * (self._u + shift)
        return torch.where(self._weights > 0, gradient, 0.0)

    def logprob_slope(self) -> Tensor:
        """Return [rows, V], the log-probs' gradient. It overwrites the chunk's weights."""
        gradient = self._weights.div_(-self._total)
        gradient[torch.arange(len(gradient), device=gradient.device), self.targets] += 1.0
        return gradient

    def to_logits(self, slope: Tensor) -> Tensor:
        """Return [rows, V] the gradient with respect to the products, but for their scale / T."""
        if self.capped is not None and self.head.softcap is not None:
            slope = slope * (1 - (self.capped / self.head.softcap).square())
        return slope.to(self.head.weight.dtype)

    def to_hidden(self, slope: Tensor) -> Tensor:
        """Return [rows, H] from the gradient with respect to logits / T, [rows, V]."""
        hidden_gradient = dense_product(self.to_logits(slope), self.head.weight.T)
        return hidden_gradient.mul_(self.head.scale / self.temperature)


def exponentials(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return exp(x) of x <= 0, in `out` if given; 0 where float32 holds it with fewer digits or not
    at all. NaN stays.

    MKL, which computes it on a CPU, takes 8 to 25 times as long for each such number.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return torch.exp(x, out=out)
    return F.threshold(
        torch.clamp(x, min=_LOG_SMALLEST, out=out).exp_(), _SMALLEST, 0.0, inplace=True
    )
