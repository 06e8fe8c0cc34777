"""The built-in losses, corrections and aggregations by name, and the arguments of a custom loss.

This module does not import torch, because the configuration takes its known names from these tables
(docs/losses.md has the formulas).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ActionTokens:
    """The action tokens of some sequences, [N] each. Only `new` and `entropy` carry gradient."""

    new: "Tensor"
    """Log-probs of the policy that learns."""
    old: "Tensor"
    """Log-probs in the ratio's denominator: the sampler's, or the learner's own before the first
    update.
    """
    sampler: "Tensor"
    """Log-probs that the sampler recorded. They differ from `old` only if the learner recomputes
    old log-probs.
    """
    advantages: "Tensor"
    weights: "Tensor"
    """Weights of the policy terms, `sequence_weights` of the whole optimizer batch, one per token.
    retrain applies them outside of the terms.
    """
    lengths: Sequence[int]
    """Action tokens of each sequence; a sequence is never split."""
    reference: "Tensor | None" = None
    """Log-probs of [loss] kl_reference; needed where kl_coef is not 0."""
    entropy: "Tensor | None" = None
    """Needed where entropy_coef is not 0."""
    regularizer_weights: "Tensor | None" = None
    """Weights of the KL and entropy terms, which more rows may have; None means `weights`."""


@dataclass(frozen=True)
class BuiltinLoss:
    """The facts about a built-in [loss] mode that the check of a configuration needs."""

    parameters: Mapping[str, float] = field(default_factory=dict)
    """Names of `[loss] params` and their defaults; each is a number above 0."""


LOSSES: dict[str, BuiltinLoss] = {
    "importance_sampling": BuiltinLoss(),
    "ppo": BuiltinLoss(),
    "gspo": BuiltinLoss(),
    "cispo": BuiltinLoss(),
    "sapo": BuiltinLoss({"tau_pos": 1.0, "tau_neg": 1.05}),
    "gmpo": BuiltinLoss(),
    "dppo": BuiltinLoss({"cap": 20.0}),
}
"""[loss] mode."""

TINKER_LOSSES = ("importance_sampling", "ppo", "cispo")
"""Values of [loss] mode that a Tinker service computes; retrain computes the others."""

CORRECTIONS: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "tis": frozenset({"correction_cap"}),
    "icepop": frozenset({"correction_low", "correction_high"}),
    "seq_tis": frozenset({"correction_cap"}),
    "seq_mask": frozenset({"correction_low", "correction_high"}),
    "geometric": frozenset({"correction_low", "correction_high"}),
}
"""[loss] correction, and the keys of its bounds."""

AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant", "sum")
"""[loss] aggregation."""


ATTRIBUTES = ("own_term", "sequence_level", "needs_entropy", "needs_reference")
"""Attributes of the function of a custom loss, such as `sapo.own_term = True`. `own_term` says that
it has a gradient where the advantage is 0. `sequence_level` says that the term of a token depends
on the other tokens of its sequence. `needs_entropy` and `needs_reference` say that it reads
`tokens.entropy` or `tokens.reference`, so that retrain computes them.
"""
