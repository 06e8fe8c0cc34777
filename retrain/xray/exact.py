"""The exact lab: a policy whose answers can all be counted, so that an algorithm's expected
gradient is a sum and not an estimate.

An answer is two tokens of three, so there are nine answers, and three are right. The policy is a
table of logits: 3 of the first token, 3 of the second after each. Every group of G answers goes
through the credit pipeline and the loss that a run uses, and its gradient counts by the group's
probability. The sum is held against grad p, the gradient of the probability of a right answer:
whatever climbs a function f(p) has the gradient f'(p) grad p, at every table of logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from math import factorial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.step import Segments, StepTokens
from retrain.backends.local.loss import policy_loss
from retrain.backends.losses import ActionTokens
from retrain.backends.own_loss import aggregation_of, own_correction, own_loss
from retrain.backends.rows import sequence_weights
from retrain.errors import ConfigurationError
from retrain.system import Json
from retrain.types import Float64Array

if TYPE_CHECKING:
    from retrain.config import TrainConfig

_VOCABULARY = 3
_ANSWERS = list(product(range(_VOCABULARY), repeat=2))
_RIGHT = ((0, 1), (1, 0), (2, 2))
MAX_EXACT_GROUP = 8
"""Completions; there are 12,870 different groups of 8."""
_POLICIES = 6
_AWAY = 0.1
"""Size of the step between the policy that sampled and the one that learns, in logits."""
_EXACT = 1e-5
"""Maximum relative error that counts as 0. Advantages add 1e-6 to their denominators."""


@dataclass(frozen=True)
class ExactXray:
    """The expected gradient g of one algorithm, at several policies."""

    name: str
    group: int
    rates: Float64Array
    """[n] p, the probability of a right answer."""
    weights: Float64Array
    """[n] f'(p): the multiple of grad p that is nearest to g."""
    elsewhere: float
    """Largest share of g that is no multiple of grad p: |g - f'(p) grad p| / |g|."""
    off_policy: float
    """The same where the sampling policy is `_AWAY` behind."""

    def sentence(self) -> str:
        """Name the objective that it climbs, or give the share of its gradient that no objective
        explains.
        """
        away = (
            f" A step of {_AWAY:g} in every logit off policy, {self.off_policy:.1%} of the gradient"
            " points elsewhere."
        )
        if not np.any(np.abs(self.weights) > _EXACT) and self.elsewhere == 0:
            return "no gradient: unbiased for nothing."
        if self.elsewhere > _EXACT:
            return (
                "biased for every objective of the pass rate: at worst"
                f" {self.elsewhere:.1%} of its gradient points elsewhere.{away}"
            )
        for name, slope in self._objectives():
            ratio = self.weights / slope
            if np.allclose(ratio, ratio[0], rtol=_EXACT) and ratio[0] > 0:
                factor = ""
                if not np.isclose(ratio[0], 1, rtol=_EXACT):
                    factor = f", times {ratio[0]:.4g}"
                return f"unbiased for {name}{factor}.{away}"
        low, high = int(np.argmin(self.rates)), int(np.argmax(self.rates))
        relative = self.weights / self.weights[np.argmin(np.abs(self.rates - 0.5))]
        return (
            "biased for pass@1 and every pass@k: it climbs a function of its own, with weight"
            f" {relative[low]:.3g} at p = {self.rates[low]:.2g} and {relative[high]:.3g} at p ="
            f" {self.rates[high]:.2g} beside 1 near p = 0.5 (retrain xray draws it).{away}"
        )

    def to_json(self) -> Json:
        return {
            "name": self.name,
            "group": self.group,
            "rates": self.rates.tolist(),
            "weights": self.weights.tolist(),
            "elsewhere": self.elsewhere,
            "off_policy": self.off_policy,
            "verdict": self.sentence(),
        }

    def _objectives(self) -> Iterator[tuple[str, Float64Array]]:
        """Names of known objectives with their slopes at `rates`."""
        yield "pass@1", np.ones_like(self.rates)
        for k in range(2, self.group + 1):
            yield f"pass@{k}", k * (1 - self.rates) ** (k - 1)
        order = self.group - 1
        yield (
            f"log p, expanded to order {order}",
            (1 - (1 - self.rates) ** order) / self.rates,
        )


def exact(name: str, config: "TrainConfig", group: int) -> ExactXray:
    """Sum the expected gradient of `config`'s advantage, transform, loss and aggregation over all
    groups of `group` answers.

    A step has many prompts, so that `token_mean` divides by one number. Raises ConfigurationError
    for a group that is too large to count, and for an advantage that compares over the step.
    """
    if not 2 <= group <= MAX_EXACT_GROUP:
        raise ConfigurationError(
            f"{name}: an exact X-ray counts all groups of 2 to {MAX_EXACT_GROUP} completions, not"
            f" of {group}; name one, such as --group 4."
        )
    lab = _Lab(config, group)
    rng = np.random.default_rng(0)
    found = []
    # From a policy that is mostly wrong to one that is mostly right.
    for lift in np.linspace(-2.5, 2.5, _POLICIES):
        logits = torch.from_numpy(rng.standard_normal((1 + _VOCABULARY, _VOCABULARY)))
        for first, second in _RIGHT:
            logits[1 + first, second] += lift
        behind = torch.from_numpy(rng.choice((-1.0, 1.0), logits.shape)) * _AWAY
        _, away = lab.compared(logits, logits + behind)
        found.append((lab.rate(logits), *lab.compared(logits, logits), away))
    rates, weights, elsewhere, off_policy = zip(*found, strict=True)
    return ExactXray(
        name, group, np.array(rates), np.array(weights), max(elsewhere), max(off_policy)
    )


class _Lab:
    """All groups of answers, with the functions that a run would call on them."""

    def __init__(self, config: "TrainConfig", group: int) -> None:
        self.config, self.group = config, group
        self._credit = CreditPipeline(config, lambda ids: ["x"] * len(ids))
        self._loss, self._correction = own_loss(config), own_correction(config)
        self._aggregation = aggregation_of(config)
        groups = list(combinations_with_replacement(range(len(_ANSWERS)), group))
        self.groups = np.array(groups)
        """[M, G] numbers of the answers, the order within a group left out."""
        ways = [np.prod([factorial(n) for n in np.bincount(row)]) for row in self.groups]
        self._ways = factorial(group) / np.array(ways, np.float64)
        """[M] orders of each group."""
        self._tokens = torch.tensor(_ANSWERS)

    def rate(self, logits: Tensor) -> float:
        return float(self._rate(logits))

    def _rate(self, logits: Tensor) -> Tensor:
        right = [_ANSWERS.index(answer) for answer in _RIGHT]
        return self._logprobs(logits).sum(dim=1)[right].exp().sum()

    def _logprobs(self, logits: Tensor) -> Tensor:
        """[answers, 2] log-probs of each answer's tokens."""
        scores = logits.log_softmax(dim=1)
        first, second = self._tokens.T
        return torch.stack([scores[0, first], scores[1 + first, second]], dim=1)

    def _entropies(self, logits: Tensor) -> Tensor:
        """[answers, 2] entropies of the distributions that the tokens are drawn from."""
        scores = logits.log_softmax(dim=1)
        entropies = -(scores.exp() * scores).sum(dim=1)
        first = self._tokens[:, 0]
        return torch.stack([entropies[0].expand(len(first)), entropies[1 + first]], dim=1)

    def compared(self, logits: Tensor, sampled: Tensor) -> tuple[float, float]:
        """The multiple of grad p that is nearest to the expected gradient at `logits` of groups
        drawn at `sampled`, and the share of the gradient that is left.
        """
        at = logits.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self._rate(at), at)
        gradient = self._gradient(logits, sampled)
        weight = float((gradient * slope).sum() / (slope * slope).sum())
        norm = float(gradient.norm())
        # A gradient that only rounding made is none.
        if norm < 1e-9 * float(slope.norm()):
            return 0.0, 0.0
        return weight, float((gradient - weight * slope).norm()) / norm

    def _gradient(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """Minus the expected gradient of the loss, of a group's mean per completion."""
        old, entropies = self._logprobs(sampled), self._entropies(sampled)
        flat = torch.from_numpy(self.groups.ravel())
        step = self._step(old[flat].flatten().numpy(), entropies[flat].flatten().numpy())
        assigned = self._credit.compute(step, 0, 1.0)
        self._refuse_comparing_over_the_step(step, assigned.final)
        chances = self._ways * old.sum(dim=1).exp().numpy()[self.groups].prod(axis=1)
        # A group counts by its probability, so that the gradient of this sum is the expected one.
        weights = np.repeat(chances[:, None] * self._completion_weights(), 2, axis=1)
        at = logits.clone().requires_grad_()
        tokens = ActionTokens(
            new=self._logprobs(at)[flat].flatten(),
            old=old[flat].flatten(),
            sampler=old[flat].flatten(),
            advantages=torch.from_numpy(assigned.final.copy()),
            weights=torch.from_numpy(weights.ravel()),
            lengths=[2] * self.groups.size,
            reference=old[flat].flatten(),
            entropy=self._entropies(at)[flat].flatten(),
        )
        terms = correction = None
        if self._loss:
            terms = self._loss(tokens).values
        if self._correction:
            correction = self._correction(tokens)
        loss = policy_loss(tokens, self.config.loss, terms, correction)
        (gradient,) = torch.autograd.grad(loss, at)
        return -gradient

    def _completion_weights(self) -> Float64Array:
        """Return [G] weights of the tokens of each completion, scaled to 1/G for completions of
        equal length.
        """
        given = np.array(
            sequence_weights([2] * self.group, self._aggregation, 2, groups=[0] * self.group)
        )
        total = given.sum() or 1.0
        return np.asarray(given / total, np.float64)

    def _step(self, logprobs: Float64Array, entropies: Float64Array) -> StepTokens:
        right = np.array([answer in _RIGHT for answer in _ANSWERS], np.float64)
        segments = Segments([2] * self.groups.size)
        return StepTokens(
            rewards=right[self.groups].tolist(),
            segments=segments,
            logprobs=np.minimum(logprobs, 0.0),
            entropies=entropies,
            planning=np.zeros(segments.total, np.bool_),
            in_loss=np.ones(len(segments), np.bool_),
        )

    def _refuse_comparing_over_the_step(self, step: StepTokens, final: Float64Array) -> None:
        """Raise ConfigurationError if the advantages of a group depend on the other groups of its
        step.
        """
        middle = len(self.groups) // 2
        size = 2 * self.group
        part = slice(middle * size, (middle + 1) * size)
        alone = StepTokens(
            rewards=[step.rewards[middle]],
            segments=Segments([2] * self.group),
            logprobs=step.logprobs[part],
            entropies=None if step.entropies is None else step.entropies[part],
            planning=step.planning[part],
            in_loss=np.ones(self.group, np.bool_),
        )
        own = self._credit.compute(alone, 0, 1.0).final
        if not np.allclose(own, final[part], rtol=1e-6):
            raise ConfigurationError(
                f"{self.config.condition_label}: its advantage compares over the whole step, whose"
                " other prompts an exact X-ray does not know; leave --exact out."
            )
