"""Rows to a learner and its result, the same for every backend: checks, the shift, loss weights,
minibatches, learning rate, ratios.

This module does not need torch, so a backend whose service computes elsewhere installs without it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from retrain.noise import Stream, uniform
from retrain.types import Float32Array, Int32Array, Row, StepResult

if TYPE_CHECKING:
    from retrain.config.schema import Training

Aggregation = str
"""A name of `retrain.backends.losses.AGGREGATIONS`."""
TokenWeights = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Sequence[float]]
"""([completions] tokens that count, at least one each; [completions] group) -> the weight of one
token of each completion."""


class StepRow(Protocol):
    """A row with its place in the step."""

    @property
    def number(self) -> int: ...


AnyRow = TypeVar("AnyRow", bound=StepRow)


# -- one row ---------------------------------------------------------------------------------------


class Shift(NamedTuple):
    """The actions of one row, shifted: the state at `predictors[t]` predicts `targets[t]`."""

    predictors: npt.NDArray[np.int64]
    """[T] positions in the row's token_ids, each one before its action."""
    targets: Int32Array
    """[T] the action tokens."""


def shift(row: Row) -> Shift:
    """Return predictors and targets of the action tokens, in order; the sampled EOS is the last
    target, and nothing follows it.
    """
    positions = np.fromiter(row.action_positions(), dtype=np.int64, count=row.num_actions)
    return Shift(positions - 1, row.token_ids[positions])


def needed_tokens(row: Row) -> int:
    """Count the tokens that a forward pass over the row must read: all up to the last predictor.
    The last action is only a target.
    """
    if row.num_actions:
        return row.spans[-1][1] - 1
    return 0


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError naming the row whose spans, log-probs, advantages or kept counts do not fit
    its tokens.
    """
    for index, row in enumerate(rows):
        # Position 0 has no prediction.
        edge = 1
        for start, stop in row.spans:
            if not edge <= start <= stop <= len(row.token_ids):
                raise ValueError(
                    f"row {index}: span ({start}, {stop}) must lie in order within [{edge},"
                    f" {len(row.token_ids)}]"
                )
            edge = stop
        if not len(row.logprobs) == len(row.advantages) == row.num_actions:
            raise ValueError(
                f"row {index}: {row.num_actions} action tokens, but {len(row.logprobs)} log-probs"
                f" and {len(row.advantages)} advantages"
            )
        if row.kept is not None and (len(row.kept) != row.num_actions or (row.kept < 1).any()):
            raise ValueError(
                f"row {index}: {row.num_actions} action tokens need as many kept counts of 1 or"
                f" more, not {row.kept.tolist()}"
            )


def for_each_row(rows: Sequence[Row], found: Iterable[Float32Array]) -> list[Float32Array]:
    """Return one array for each row: the next array of `found` for a row with actions, else an
    empty array.
    """
    values = iter(found)
    return [next(values) if row.num_actions else np.empty(0, np.float32) for row in rows]


def first_nonfinite(inputs: Mapping[str, Sequence[Float32Array]]) -> str:
    """Return the name of the first inputs that are not finite; "" if all are."""
    for name, arrays in inputs.items():
        if not all(np.isfinite(array).all() for array in arrays):
            return name
    return ""


# -- an optimizer batch ----------------------------------------------------------------------------


def sequence_weights(
    lengths: Sequence[int],
    aggregation: Aggregation | TokenWeights,
    max_tokens: int = 0,
    completions: float | None = None,
    groups: Sequence[int] | None = None,
) -> list[float]:
    """Return the weight of one token of each sequence of the whole optimizer batch; `lengths`
    counts the tokens that a mean is over.

    By `token_mean` it is 1 / all these tokens. By `sequence_mean` it is 1 / (sequences with tokens
    * own length). By `prompt_mean` it is 1 / (prompts with tokens * tokens of the own prompt), as
    in ScaleRL (2510.13786). By `constant` it is 1 / (completions * max_tokens), and by `sum` it is
    1. An empty sequence has no token to weigh. `completions` counts the completions drawn for the
    batch; by default each sequence counts. `groups` says which sequences answer one prompt; by
    default each sequence has its own prompt.
    """
    groups = range(len(lengths)) if groups is None else groups
    if callable(aggregation):
        return _own_weights(lengths, aggregation, groups)
    if aggregation == "token_mean":
        return [1 / max(sum(lengths), 1)] * len(lengths)
    if aggregation == "sequence_mean":
        completed = sum(length > 0 for length in lengths)
        return [1 / (completed * length) if length else 0.0 for length in lengths]
    if aggregation == "prompt_mean":
        tokens = Counter[int]()
        for group, length in zip(groups, lengths, strict=True):
            tokens[group] += length
        prompts = sum(count > 0 for count in tokens.values())
        return [
            1 / (prompts * tokens[group]) if length else 0.0
            for group, length in zip(groups, lengths, strict=True)
        ]
    if aggregation == "constant":
        if max_tokens < 1:
            raise ValueError(
                "aggregation constant divides by max_tokens, which must be at least 1, not"
                f" {max_tokens}"
            )
        drawn = len(lengths) if completions is None else completions
        return [1 / (drawn * max_tokens)] * len(lengths)
    return [1.0] * len(lengths)


def _own_weights(
    lengths: Sequence[int], aggregation: TokenWeights, groups: Sequence[int]
) -> list[float]:
    """Ask a plugin, which is shown the sequences that have tokens."""
    filled = [index for index, length in enumerate(lengths) if length]
    if not filled:
        return [0.0] * len(lengths)
    shown = np.array([(lengths[index], groups[index]) for index in filled], np.int64)
    given = dict(zip(filled, aggregation(shown[:, 0].copy(), shown[:, 1].copy()), strict=True))
    return [given.get(index, 0.0) for index in range(len(lengths))]


def row_weights(
    rows: Sequence[Row],
    counts: Sequence[int],
    aggregation: Aggregation | TokenWeights,
    max_tokens: int,
    completions: float,
) -> list[float]:
    """Return `sequence_weights` for rows. A completion with a rewritten history has several rows,
    which count as one sequence.

    `counts` has the number of tokens of each row that a mean counts. A row without such tokens
    weighs nothing.
    """
    of_row = [(row.group, row.sample) for row in rows]
    lengths = Counter[tuple[int, int]]()
    for key, count in zip(of_row, counts, strict=True):
        lengths[key] += count
    groups = [group for group, _ in lengths]
    weights = dict(
        zip(
            lengths,
            sequence_weights(list(lengths.values()), aggregation, max_tokens, completions, groups),
            strict=True,
        )
    )
    return [weights[key] if count else 0.0 for key, count in zip(of_row, counts, strict=True)]


def num_completions(rows: Sequence[Row]) -> int:
    """Count the completions that the rows belong to."""
    return len({(row.group, row.sample) for row in rows})


def minibatch_split(
    rows: Sequence[AnyRow], count: int, seed: int, step: int, turn: int
) -> list[list[AnyRow]]:
    """Split rows into `count` parts of nearly equal size for pass number `turn`, with random
    numbers from the counter noise. The result omits empty parts.

    The split draws single rows, not groups. The parts stay equal in size whatever the groups, and
    each sees nearly every prompt.
    """
    if count == 1:
        return [list(rows)]
    numbers = np.array([row.number for row in rows])
    order = np.argsort(uniform(seed, Stream.MINIBATCH, step, turn, 0, numbers), kind="stable")
    return [
        [rows[index] for index in sorted(part)]
        for part in np.array_split(order, count)
        if len(part)
    ]


def learning_rate(training: "Training", step: int) -> float:
    """Return the rate of training step `step`, counted from 0.

    It rises linearly to `lr` over the warm-up's steps (the first step is not 0), then stays, or
    falls to 0 at the horizon.
    """
    peak, warmup_steps = training.lr, training.lr_warmup_steps
    horizon = training.lr_horizon or training.max_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, horizon - warmup_steps))
    if training.lr_schedule == "linear":
        return peak * (1 - progress)
    if training.lr_schedule == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    return peak


# -- the result of a step --------------------------------------------------------------------------


@dataclass
class Update:
    """One optimizer update, done or skipped."""

    loss: float = math.nan
    grad_norm: float = math.nan
    clipped: float = 0.0
    clippable: float = 0.0
    """Both as in `clip_counts`."""
    metrics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(sum, number) of the values of each metric of a custom loss."""
    entropy: tuple[float, float] = (0.0, 0.0)
    """(sum, number) of the entropies of its action tokens, if the learner computed them."""
    nonfinite: str = ""
    """The non-finite tensor that made the learner skip the update; "" for an applied update."""


def step_result(
    updates: Sequence[Update],
    log_ratios: Sequence[Float32Array],
    before: Sequence[Float32Array],
    max_tokens: int,
    kl_mean: float | None = None,
) -> StepResult:
    """Return the result of a step. Loss and gradient norm are means over the applied updates: NaN
    if the learner skipped all updates, None without updates.

    `log_ratios`: learner - sampler log-prob of the action tokens, each token once. `before`: the
    log ratios of the first minibatch of the first pass, which no update of the step has moved. The
    entropies come from the same minibatch. `max_tokens`: the maximum length of one completion.
    """
    entropy, tokens = updates[0].entropy if updates else (0.0, 0.0)
    done = [update for update in updates if not update.nonfinite]
    skipped = [update for update in updates if update.nonfinite]
    clippable = sum(update.clippable for update in done)
    names = dict.fromkeys(chain.from_iterable(update.metrics for update in done))
    sums = {
        name: np.sum([update.metrics[name] for update in done if name in update.metrics], axis=0)
        for name in names
    }
    return StepResult(
        loss=_mean([update.loss for update in done]) if updates else None,
        grad_norm=_mean([update.grad_norm for update in done]) if updates else None,
        updates=len(done),
        nonfinite_updates=len(skipped),
        nonfinite_tensor=skipped[0].nonfinite if skipped else "",
        kl_mean=kl_mean,
        entropy_mean=entropy / tokens if tokens and math.isfinite(entropy) else None,
        clip_fraction=sum(update.clipped for update in done) / clippable if clippable else None,
        loss_metrics={
            name: float(total / number) for name, (total, number) in sums.items() if number
        }
        or None,
        **_ratio_statistics(log_ratios),
        **mismatch_fields(before, max_tokens),
    )


def _ratio_statistics(log_ratios: Sequence[Float32Array]) -> dict[str, Any]:
    """Return statistics of the ratio w = exp(d) over all tokens, d = learner - sampler log-prob;
    `ess` is Kish's effective share of the tokens.
    """
    d = np.concatenate([np.empty(0, np.float32), *log_ratios]).astype(np.float64)
    if not len(d):
        return dict.fromkeys(("ratio_mean", "ratio_max", "mismatch_k1", "mismatch_kl", "ess"))
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.exp(d)
        return {
            "ratio_mean": float(w.mean()),
            "ratio_max": float(w.max()),
            "ratio_min": float(w.min()),
            "mismatch_k1": float(-d.mean()),
            "mismatch_kl": float((np.expm1(d) - d).mean()),
            "ess": float(w.sum() ** 2 / (len(w) * np.square(w).sum())),
        }


def mismatch_fields(log_ratios: Sequence[Float32Array], max_tokens: int) -> dict[str, Any]:
    """Return the logprob_diff_* fields of a result; {} without tokens."""
    sizes = np.abs(np.concatenate([np.empty(0, np.float32), *log_ratios]).astype(np.float64))
    if not len(sizes):
        return {}
    with np.errstate(invalid="ignore"):
        p50, p90, p99 = np.quantile(sizes, (0.5, 0.9, 0.99)).tolist()
    return {
        "logprob_diff_mean": float(sizes.mean()),
        "logprob_diff_p50": p50,
        "logprob_diff_p90": p90,
        "logprob_diff_p99": p99,
        "logprob_diff_tokens": len(sizes),
        "logprob_diff_by_depth": by_depth(log_ratios, max_tokens),
    }


def by_depth(log_ratios: Sequence[Float32Array], max_tokens: int) -> list[float | None]:
    """Return the mean absolute log-ratio in each quarter of the positions up to `max_tokens`; None
    if no token is. Later tokens, of a dialogue's next replies, count in the last quarter.
    """
    sizes = np.abs(np.concatenate(log_ratios).astype(np.float64))
    quarters = 4 * np.concatenate([np.arange(len(one)) for one in log_ratios]) // max_tokens
    parts = [sizes[quarters.clip(max=3) == quarter] for quarter in range(4)]
    return [float(part.mean()) if len(part) else None for part in parts]


def _mean(values: Sequence[float]) -> float:
    if values:
        return float(np.mean(values))
    return math.nan
