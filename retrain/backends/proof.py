"""Proofs about a custom loss, on a small batch in float64, before a run starts.

A plugin gives terms and nothing else. It cannot see the micro-batches, its process, or the number
of its calls. A run relies on every property below. One sentence reports the first that does not
hold.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from retrain.backends.losses import ActionTokens
from retrain.backends.own_loss import OwnFunction, own_functions
from retrain.plugins import Fault, probe

if TYPE_CHECKING:
    from retrain.config import TrainConfig

LENGTHS = (3, 1, 4, 2, 4)


@dataclass(frozen=True)
class Batch:
    """A small batch, and the leaves that its gradients arrive at."""

    tokens: ActionTokens
    new: Tensor
    entropy: Tensor

    def part(self, index: Sequence[int], lengths: Sequence[int]) -> ActionTokens:
        """Return some of the tokens as a batch of their own, as a micro-batch has them."""
        values = {field.name: getattr(self.tokens, field.name) for field in fields(self.tokens)}
        chosen = {
            name: value[list(index)] for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self.tokens, **chosen, lengths=tuple(lengths))


def small_batch(
    function: OwnFunction | None = None,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Batch:
    """Make 14 tokens of 5 sequences: two certain tokens (log-prob 0), ratios around 1, advantages
    of both signs and one advantage of 0.

    The batch has `entropy` and `reference` if the function declares that it reads them, or if it is
    None.
    """
    draw, count = torch.Generator().manual_seed(3), sum(LENGTHS)

    def normal(scale: float) -> Tensor:
        return (torch.randn(count, generator=draw, dtype=torch.float64) * scale).to(device, dtype)

    certain = torch.arange(count, device=device) % 9 == 2
    leaf = (normal(1.0).abs().neg() - 0.01).masked_fill(certain, 0.0).requires_grad_()
    entropy = normal(1.0).abs().requires_grad_()
    old = (leaf.detach() + normal(0.3)).clamp(max=0.0).masked_fill(certain, 0.0)
    advantages = normal(1.0)
    advantages[count // 2] = 0.0
    given = {
        name: function is None or function.declares(f"needs_{name}")
        for name in ("entropy", "reference")
    }
    reference = (leaf.detach() + normal(0.3)).clamp(max=0.0)
    tokens = ActionTokens(
        new=leaf.clone(),  # in a run it is not a leaf either
        old=old,
        sampler=(old + normal(0.05)).clamp(max=0.0),
        advantages=advantages,
        weights=normal(0.1).abs() + 0.01,
        lengths=LENGTHS,
        reference=reference if given["reference"] else None,
        entropy=entropy.clone() if given["entropy"] else None,
        regularizer_weights=normal(0.1).abs() + 0.01,
    )
    return Batch(tokens, leaf, entropy)


def prove(function: OwnFunction) -> None:
    """Raise Fault for the first property of a plugin that does not hold. torch's random state stays
    as it was.
    """
    provers = {"loss": prove_loss, "correction": prove_correction, "aggregation": prove_aggregation}
    with torch.random.fork_rng(devices=[]):
        provers[function.kind](function)


def proof_warnings(config: "TrainConfig") -> dict[str, str]:
    """Return kind -> warning for each plugin of [loss] that lacks a property, where [plugins]
    strict is false.

    Raises ConfigurationError for the first of them if strict is true, or for a plugin that does not
    load.
    """
    return {
        function.kind: warning
        for function in own_functions(config)
        for warning in probe(function, config, partial(prove, function))
    }


# -- [loss] mode -----------------------------------------------------------------------------------


def prove_loss(function: OwnFunction) -> None:
    """Raise Fault for the first of four properties that does not hold. Terms and gradient are
    finite; the gradient goes through tokens.new alone. It is zero where the advantage is zero. Both
    do not depend on the micro-batches.
    """
    batch = small_batch(function)
    _tried(function, batch.tokens)
    values = _finite_terms(function, batch)
    _proved_gradient(values, batch)
    # First, since advantages whitened over the batch fail the next property too, for a reason that
    # is not theirs.
    _does_not_depend_on_the_cut(function)
    silent = small_batch(function)
    none = replace(silent.tokens, advantages=torch.zeros_like(silent.tokens.advantages))
    own = _gradient(function.call(none).values, silent)  # for `has_wrong_sign` too
    if not function.declares("own_term") and (own != 0).any():
        raise Fault(
            "has a gradient where every advantage is 0; multiply its terms by"
            f" tokens.advantages, or declare {_attribute(function, 'own_term')} = True"
        )
    start = on_policy(function)  # the first update of every step
    if not torch.isfinite(_gradient(_finite_terms(function, start), start)).all():
        raise Fault("has a gradient that is not finite where tokens.new equals tokens.old")


def on_policy(function: OwnFunction) -> Batch:
    """Return the small batch with the learner's policy as the sampling policy."""
    batch = small_batch(function)
    same = batch.new.detach()
    return replace(batch, tokens=replace(batch.tokens, old=same, sampler=same))


def has_wrong_sign(function: OwnFunction) -> bool:
    """True if minimizing the terms makes tokens with a positive advantage less probable where old
    and new policy are equal.

    retrain only warns of it, since a loss may intend it.
    """
    batch = on_policy(function)
    silent = replace(batch.tokens, advantages=torch.zeros_like(batch.tokens.advantages))
    own = _gradient(function.call(batch.tokens).values, batch)
    own = own - _gradient(function.call(silent).values, batch)
    return bool((own * batch.tokens.advantages).sum() > 0)


def _finite_terms(function: OwnFunction, batch: Batch) -> Tensor:
    """Return its terms. Raises Fault also for a change of its inputs in place."""
    versions = {name: tensor._version for name, tensor in _tensors(batch.tokens)}
    values: Tensor = function.call(batch.tokens).values
    for name, tensor in _tensors(batch.tokens):
        if tensor._version != versions[name]:
            raise Fault(f"changes tokens.{name} in place; make a new tensor")
    if batch.new.grad is not None:
        raise Fault("calls backward() itself; return the terms, and retrain calls it")
    for place in torch.nonzero(~torch.isfinite(values)).flatten().tolist():
        given = ", ".join(
            f"{name} = {getattr(batch.tokens, name)[place].item():.3g}"
            for name in ("new", "old", "advantages")
        )
        raise Fault(
            f"gives {values[place].item()} for a token with {given}; its terms must be finite"
        )
    return values


def _tensors(tokens: ActionTokens) -> Iterator[tuple[str, Tensor]]:
    for field in fields(tokens):
        value = getattr(tokens, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def _tried(function: OwnFunction, *inputs: Any) -> Any:
    """Call it for the first time. Raises Fault for an input that it reads and does not declare."""
    try:
        return function.call(*inputs)
    except Exception:
        full = small_batch().tokens
        for name in ("entropy", "reference"):
            try:
                filled = {name: getattr(full, name)}
                function.call(replace(small_batch(function).tokens, **filled))
            except Exception:  # noqa: BLE001 - then it fails for another reason
                continue
            raise Fault(
                f"reads tokens.{name}, which is None unless it declares"
                f" {_attribute(function, f'needs_{name}')} = True"
            ) from None
        raise


def _attribute(function: OwnFunction, name: str) -> str:
    return f"{function.name.rpartition('.')[2]}.{name}"


def _proved_gradient(values: Tensor, batch: Batch) -> None:
    for leaf in _leaves(values.grad_fn):
        if leaf is not batch.new and leaf is not batch.entropy:
            raise Fault(
                "carries gradient into a tensor other than tokens.new and tokens.entropy; detach"
                " that"
            )
    gradient = _gradient(values, batch)
    if not torch.isfinite(gradient).all():
        raise Fault("has a gradient that is not finite")
    if not gradient.any():
        raise Fault(
            "has no gradient through tokens.new at any token of a small batch, so the model"
            " would not learn"
        )


def _leaves(node: Any) -> Iterator[Tensor]:
    """Yield the leaf tensors that a graph accumulates gradient into."""
    waiting, seen = [node], set[Any]()
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        if hasattr(one, "variable"):
            yield one.variable
        waiting += [following for following, _ in one.next_functions]


def _gradient(values: Tensor, batch: Batch, weights: Tensor | None = None) -> Tensor:
    """Return the [N] gradient of the weighted sum by the log-probs; zeros without a path."""
    if values.grad_fn is None:
        return torch.zeros_like(batch.new)
    weighted = (values * (batch.tokens.weights if weights is None else weights)).sum()
    (found,) = torch.autograd.grad(weighted, batch.new, allow_unused=True, retain_graph=True)
    return torch.zeros_like(batch.new) if found is None else found


def _does_not_depend_on_the_cut(function: OwnFunction) -> None:
    """Raise Fault if terms or gradients depend on the other sequences of a batch, for a token-level
    loss also on other tokens, or on tokens.weights.
    """
    sequences = _sequences()
    if not _equal_parts(function, [(index, [len(index)]) for index in reversed(sequences)]):
        raise Fault(
            "gives a sequence other terms when it stands alone, so the result would depend on"
            " the micro-batches, or on chance. A term may read only its own sequence, and not"
            " tokens.weights ([loss] aggregation takes the mean)"
        )
    whole = list(range(sum(LENGTHS)))
    if not function.declares("sequence_level") and not _equal_parts(
        function, [(whole, [1] * len(whole))]
    ):
        raise Fault(
            "gives a token other terms when it is a sequence of its own, so it reads its sequence;"
            f" declare {_attribute(function, 'sequence_level')} = True"
        )


def _sequences() -> list[list[int]]:
    """Return the indices of each sequence's tokens in the small batch."""
    ends = accumulate(LENGTHS)
    return [list(range(end - length, end)) for end, length in zip(ends, LENGTHS, strict=True)]


def _equal_parts(
    function: OwnFunction, parts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> bool:
    batch = small_batch(function)
    whole = function.call(batch.tokens).values
    gradient = _gradient(whole, batch)
    summed = torch.zeros_like(gradient)
    for index, lengths in parts:
        tokens = batch.part(index, lengths)
        other = replace(tokens, weights=tokens.weights * 2, regularizer_weights=None)
        values = function.call(other).values
        if not torch.allclose(values, whole[list(index)], rtol=1e-9, atol=1e-12):
            return False
        summed += _gradient(values, batch, tokens.weights)
    return torch.allclose(summed, gradient, rtol=1e-9, atol=1e-12)


# -- [loss] correction and aggregation -------------------------------------------------------------


def prove_correction(function: OwnFunction) -> None:
    batch = small_batch(function)
    weights = _tried(function, batch.tokens)
    if not torch.isfinite(weights).all():
        raise Fault("gives weights that are not finite")
    for index in _sequences():
        alone = function.call(batch.part(index, [len(index)]))
        if not torch.allclose(alone, weights[index], rtol=1e-9, atol=1e-12):
            raise Fault(
                "gives a sequence other weights when it stands alone, so the result would"
                " depend on the micro-batches"
            )


def prove_aggregation(function: OwnFunction) -> None:
    counts, group = np.array([3, 1, 4, 2, 4], np.int64), np.array([0, 0, 2, 1, 1], np.int64)
    weights, other = _tried(function, counts.copy(), group.copy()), np.array([2, 4, 0, 1, 3])
    moved = _tried(function, counts[other], (group + 7)[other])
    if not np.allclose(moved, np.array(weights)[other], rtol=1e-9):
        raise Fault(
            "gives other weights when the completions come in another order or the groups have"
            " other numbers"
        )
    if not any(weights):
        raise Fault("gives every token the weight 0, so the model would not learn")


def metric_names(function: OwnFunction, device: torch.device) -> tuple[str, ...]:
    """Return the names of the metrics that a loss reports, in order. The call is the same as in a
    run: in float32, on the learner's device.

    Raises RunFailed for what it raises there, such as a tensor of its own on another device.
    """
    return tuple(function(small_batch(function, torch.float32, device).tokens).metrics)
