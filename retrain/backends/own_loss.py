"""Custom losses: this module calls plugins of [loss] mode, correction and aggregation, and checks
their answers (docs/losses.md).

This module does not import torch; `proof.py` proves the plugins on a small batch before a run
starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrain.backends.losses import ATTRIBUTES, ActionTokens
from retrain.backends.rows import Aggregation, TokenWeights
from retrain.config.names import table
from retrain.plugins import KINDS, Fault, Plugin, load_plugin, params_of

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.config import TrainConfig

CLIPPED = "clipped"
"""The metric that is a mask: tokens whose gradient the loss took away or bounded. It becomes
`clip_fraction`."""


@dataclass(frozen=True)
class Terms:
    """The answer of a loss."""

    values: "Tensor"
    """[N] the terms to minimize, without weights."""
    clipped: "Tensor | None"
    """[N] of bool."""
    metrics: "Mapping[str, Tensor]"
    """[N] or [sequences] each, detached; retrain records their means."""


class OwnFunction(Plugin):
    """A plugin with a check of its answer."""

    def call(self, *inputs: Any, **more: Any) -> Any:
        """Raise Fault for an answer of another form."""
        return _CHECKS[self.kind](super().call(*inputs, **more), *inputs)

    def declares(self, attribute: str) -> bool:
        """True if the function has this attribute of `ATTRIBUTES`, such as `sapo.own_term =
        True`.
        """
        assert attribute in ATTRIBUTES
        return bool(getattr(self.function, attribute, False))


def own_function(kind: str, config: "TrainConfig") -> OwnFunction | None:
    """Load the plugin of [loss] mode, correction or aggregation; None for a built-in name.

    A loss takes `ActionTokens` and gives `Terms`, a correction gives detached weights [N]. Raises
    ConfigurationError.
    """
    name, builtins = config.value(KINDS[kind].path), dict.fromkeys(table(kind))
    found = load_plugin(kind, name, config, builtins)
    if name in builtins:
        return None
    return OwnFunction(kind, name, found, params_of(kind, config))


def aggregation_of(config: "TrainConfig") -> Aggregation | TokenWeights:
    """Return the built-in name of [loss] aggregation, or its plugin."""
    return own_function("aggregation", config) or config.loss.aggregation


def own_functions(config: "TrainConfig") -> list[OwnFunction]:
    """Load all plugins of [loss]."""
    return list(filter(None, (own_function(kind, config) for kind in _CHECKS)))


# -- the form of an answer -------------------------------------------------------------------------


def _shape(value: Any) -> list[int] | None:
    # Known as a tensor without importing torch.
    if hasattr(value, "grad_fn"):
        return list(value.shape)
    return None


def _one_per_token(values: Any, tokens: ActionTokens, what: str) -> None:
    shape, wanted = _shape(values), [len(tokens.new)]
    if shape != wanted:
        given = type(values).__name__ if shape is None else f"a tensor of shape {shape}"
        raise Fault(
            f"gave {given}, and must give {what}, a tensor of shape {wanted}: [loss] aggregation"
            " takes the mean"
        )


def _checked_terms(answer: Any, tokens: ActionTokens) -> Terms:
    values, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    _one_per_token(values, tokens, "one term for each action token")
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise Fault(
            f"reports metrics of type {type(metrics).__name__}, which must be a table of names and"
            " tensors"
        )
    shapes = [len(tokens.new)], [len(tokens.lengths)]
    for name, value in metrics.items():
        if _shape(value) not in shapes:
            raise Fault(
                f"reports a metric {name} that must be a tensor of shape {shapes[0]} (tokens) or"
                f" {shapes[1]} (sequences), whose mean retrain takes"
            )
    clipped = metrics.get(CLIPPED)
    if clipped is not None:
        _one_per_token(clipped, tokens, f"in the metric {CLIPPED} a mask of tokens")
        if str(clipped.dtype) != "torch.bool":
            raise Fault(
                f"reports a metric {CLIPPED} of {clipped.dtype}, which must be a mask of torch.bool"
            )
    # Sort them, since every micro-batch must report the same metrics.
    return Terms(
        values,
        clipped,
        {name: value.detach() for name, value in sorted(metrics.items()) if name != CLIPPED},
    )


def _checked_correction(answer: Any, tokens: ActionTokens) -> "Tensor":
    _one_per_token(answer, tokens, "one weight for each action token")
    if answer.requires_grad:
        raise Fault("gave weights that carry gradient; detach them")
    weights: Tensor = answer
    return weights


def _checked_aggregation(
    answer: Any,
    counts: npt.NDArray[np.int64],
    group: npt.NDArray[np.int64],  # noqa: ARG001
) -> list[float]:
    weights = np.asarray(answer, np.float64)
    if weights.shape != counts.shape:
        raise Fault(
            f"gave an array of shape {list(weights.shape)}, and must give one weight for each of"
            f" {len(counts)} completions"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise Fault(
            f"gave the weight {weights[~(weights >= 0) | np.isinf(weights)][0]}; a weight is"
            " finite and at least 0"
        )
    return [float(weight) for weight in weights]


_CHECKS: dict[str, Callable[..., Any]] = {
    "loss": _checked_terms,
    "correction": _checked_correction,
    "aggregation": _checked_aggregation,
}
