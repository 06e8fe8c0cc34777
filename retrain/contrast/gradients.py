"""The gradient of each arm on one batch: its length, its angle to the baseline's, and how far it
agrees with itself.

With g the gradient of a batch and halves of its prompts g', g'', cos(g', g'') estimates S / (S + N)
for a signal of length S^2 = |E g|^2 and the noise N of a half. So N/S = (1/cos - 1) / 2 of a whole
batch, which `seeds` reads.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

import numpy as np

from retrain.advantages.credit import Credit
from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.planning import RegexDetector
from retrain.advantages.sepa import linear_lambda
from retrain.advantages.step import BoolArray
from retrain.advantages.transforms import top_share
from retrain.analysis.power import Rule, power_of, seeds_needed
from retrain.backends.local.backend import LocalBackend
from retrain.config import TrainConfig, replaced
from retrain.contrast.batch import Arm, Batch, Say, flat_logprobs, moved_arms
from retrain.distributed import ALONE
from retrain.rewards import gold_response
from retrain.run.parts import Parts, load_encoder
from retrain.run.teacher import Teacher
from retrain.system import Json
from retrain.types import Float64Array, Outcome, Prompt, Row

PARTS = ("planning tokens", "right completions", "first quarter", "last quarter")
"""Parts of a batch whose share of the update is shown; wrong completions have what right ones
leave."""
MAX_BLOCKS = 16
"""Maximum number of blocks of prompts; the gradients of all blocks are held in memory together."""
_HALVINGS = 400
SAME = 1 - 1e-6
"""Minimum cosine at which two gradients count as equal in single precision."""
_MAX_GOLD = 256
"""Maximum number of held-out answers."""


@dataclass(frozen=True)
class ArmGradient:
    """The measurements of one arm on one batch."""

    label: str
    norm: float
    cosine: float
    """Cosine to the baseline's gradient; 0 if either gradient is 0."""
    halves: float
    """Mean cosine between its gradients on two halves of the prompts; NaN of a single prompt."""
    halves_low: float
    halves_high: float
    """5% and 95% quantiles of that cosine over the halvings."""
    shares: dict[str, float]
    """Part of `PARTS` -> its share of the update: the projection of its gradient on the whole."""
    gold: float | None
    """Predicted change, to first order, of a held-out answer's log-prob in nats, by a step of
    length lr * sqrt(parameters); None without held-out answers."""
    note: str = ""

    @property
    def is_flat(self) -> bool:
        return self.norm == 0


@dataclass(frozen=True)
class Contrast:
    batch: str
    """Where the rollouts are from."""
    step: int
    prompts: int
    completions: int
    tokens: int
    pass_rate: float
    top_share: float
    """Share of sum (1-p)^2, the energy of the tokens' gradients at the logits, in the 5% least
    likely tokens."""
    steps: int
    """Steps of a run."""
    seeds: int
    """Number of seeds of the campaign."""
    arms: list[ArmGradient]
    cosines: Float64Array
    """[A, A] cosines between the gradients of the arms."""

    def effect(self, arm: ArmGradient) -> float | None:
        """The largest standardised difference to the baseline that a pair of runs can have: the
        gradients' difference in direction over the noise of both, kept for all steps of a run.
        None where an arm does not agree with itself at all.
        """
        ceilings = (self.arms[0].halves, arm.halves)
        if not all(value > 0 for value in ceilings):
            return None
        noise = sum((1 / value - 1) / 2 for value in ceilings)
        difference = max(0.0, 2 * (1 - arm.cosine))
        return float(np.sqrt(self.steps * difference / max(noise, 1e-12)))

    def seeds_for(self, arm: ArmGradient) -> int | None:
        """Fewest seeds that find that difference in 80% of campaigns; None if none can."""
        effect = self.effect(arm)
        if not effect or self._rule.out_of_reach(effect, 1.0):
            return None
        return seeds_needed(effect, 1.0, self._rule)

    def power(self, arm: ArmGradient) -> float:
        """Probability that a campaign of `seeds` finds it."""
        return power_of(self.seeds, self.effect(arm) or 0.0, self._rule)

    @property
    def _rule(self) -> Rule:
        return Rule(len(self.arms) - 1)

    def to_json(self) -> Json:
        arms = [
            asdict(arm) | {"seeds_needed": self.seeds_for(arm) if arm is not self.arms[0] else None}
            for arm in self.arms
        ]
        return asdict(self) | {"arms": arms, "cosines": self.cosines.tolist()}


def contrast(
    parts: Parts, backend: LocalBackend, batch: Batch, arms: Sequence[Arm], seeds: int, say: Say
) -> Contrast:
    """Measure all arms on the batch."""
    gold = _gold_gradient(parts, backend)
    length = parts.credit.config.training.lr * np.sqrt(backend.num_trainable)
    planning = _planning_mask(parts, batch)
    measured: list[ArmGradient] = []
    totals: list[Float64Array] = []
    credit = None
    for arm in moved_arms(arms, parts, batch):
        say(f"Gradient of {arm.label} ...")
        credit, note = _credit(parts, batch, arm)
        blocks = _blocks(backend, arm.config, credit, batch.step)
        total = blocks.sum(axis=0)
        norm = float(np.linalg.norm(total))
        low, middle, high = halves(blocks @ blocks.T)
        measured.append(
            ArmGradient(
                arm.label,
                norm,
                _cosine(total, totals[0] if totals else total),
                middle,
                low,
                high,
                _shares(backend, arm.config, credit, batch.step, planning, total),
                None if gold is None else float(length * _projection(gold, total)),
                note,
            )
        )
        totals.append(total)
    assert credit is not None
    return Contrast(
        batch.source,
        batch.step,
        len(batch.groups),
        sum(len(group.members) for group in batch.groups),
        credit.tokens.segments.total,
        batch.pass_rate,
        top_share(flat_logprobs(batch.groups)),
        arms[0].config.training.max_steps,
        seeds,
        measured,
        np.array([[_cosine(one, other) for other in totals] for one in totals]),
    )


def _cosine(one: Float64Array, other: Float64Array) -> float:
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    if norms:
        return float(one @ other) / norms
    return 0.0


def _projection(one: Float64Array, direction: Float64Array) -> float:
    """Return the projection of `one` on `direction`; 0 if `direction` is 0."""
    norm = float(np.linalg.norm(direction))
    if norm:
        return float(one @ direction) / norm
    return 0.0


def halves(gram: Float64Array) -> tuple[float, float, float]:
    """5%, mean and 95% of the cosine between the sums of two random halves of the blocks whose
    inner products are `gram` [B, B]; NaN of one block. Halves without gradient count 0.
    """
    count = len(gram)
    if count < 2:
        return float("nan"), float("nan"), float("nan")
    # The same halvings for every arm.
    rng = np.random.default_rng(0)
    cosines = []
    for _ in range(_HALVINGS):
        one = np.zeros(count)
        one[rng.permutation(count)[: count // 2]] = 1
        other = 1 - one
        squares = np.maximum([one @ gram @ one, other @ gram @ other], 0)
        norms = float(np.sqrt(squares.prod()))
        cosines.append(float(one @ gram @ other) / norms if norms else 0.0)
    low, high = np.quantile(cosines, (0.05, 0.95))
    return float(low), float(np.mean(cosines)), float(high)


# -- one arm ---------------------------------------------------------------------------------------


def _credit(parts: Parts, batch: Batch, arm: Arm) -> tuple[Credit, str]:
    """The credit of the batch under one arm, and a note on what it had to assume or leave out."""
    config, notes = arm.config, [arm.note]
    backend = parts.credit.config.backend
    pipeline = CreditPipeline(
        config, parts.text.vocabulary.pieces, lambda name: load_encoder(backend, name, ALONE)
    )
    own, same = parts.credit.config.algorithm, ("advantage_mode", "advantage_params")
    if batch.kept and all(getattr(own, key) == getattr(config.algorithm, key) for key in same):
        pipeline.load_state_dict(dict(batch.kept))
    sepa_lambda = 0.0
    if pipeline.uses_sepa_controller:
        sepa_lambda = linear_lambda(config.sepa, batch.step)
        notes.append(
            f"SEPA's lambda is {sepa_lambda:g}, as on the linear ramp at step {batch.step}"
        )
    teacher = Teacher.of(config, parts.text, parts.backend)
    scored = teacher.logprobs if teacher else None
    credit = pipeline.assign(batch.groups, batch.step, sepa_lambda, scored)
    return credit, "; ".join(filter(None, notes))


def _blocks(backend: LocalBackend, config: TrainConfig, credit: Credit, step: int) -> Float64Array:
    """[B, D] gradients of blocks of prompts, which add up to the batch's."""
    rows = credit.rows()
    count = min(len(credit.groups), MAX_BLOCKS)
    cells: list[list[int]] = [[] for _ in range(count)]
    for number, row in enumerate(rows):
        cells[row.group % count].append(number)
    return np.stack(backend.gradients(config, rows, step, cells)).astype(np.float64)


def _shares(
    backend: LocalBackend,
    config: TrainConfig,
    credit: Credit,
    step: int,
    planning: BoolArray,
    total: Float64Array,
) -> dict[str, float]:
    """The share of each part: its gradient's projection on the whole, over the whole's length.

    A part's gradient comes from its tokens' advantages alone; what remains without any advantage,
    from KL and entropy terms, is subtracted.
    """
    square = float(total @ total)
    if not square:
        return dict.fromkeys(PARTS, 0.0)
    rest: Float64Array | float = 0.0
    if config.loss.kl_coef or config.loss.entropy_coef:
        rest = _masked(backend, config, credit, step, np.zeros_like(planning))
    masks = dict(zip(PARTS, (planning, *_masks(credit)), strict=True))
    return {
        name: float((_masked(backend, config, credit, step, mask) - rest) @ total) / square
        for name, mask in masks.items()
    }


def _masks(credit: Credit) -> tuple[BoolArray, BoolArray, BoolArray]:
    """[n] tokens of right completions, of the first and of the last quarter of each completion."""
    segments = credit.tokens.segments
    members = list(chain.from_iterable(group.members for group in credit.sources))
    verdicts = [member.score.outcome is Outcome.RIGHT for member in members]
    right = np.repeat(verdicts, segments.lengths)
    position = np.arange(segments.total) - np.repeat(segments.offsets[:-1], segments.lengths)
    place = (position + 0.5) / np.repeat(np.maximum(segments.lengths, 1), segments.lengths)
    return right, place < 0.25, place >= 0.75


def _masked(
    backend: LocalBackend, config: TrainConfig, credit: Credit, step: int, mask: BoolArray
) -> Float64Array:
    """[D] gradient of the tokens of `mask` [n]: the others lose their advantages and keep their
    weights.
    """
    part = replace(credit.assigned, stages={"part": credit.assigned.final * mask})
    rows = replace(credit, assigned=part).rows()
    (gradient,) = backend.gradients(config, rows, step, [range(len(rows))])
    return gradient.astype(np.float64)


def _planning_mask(parts: Parts, batch: Batch) -> BoolArray:
    """[n] tokens inside the run's planning phrases, found by their text."""
    detector = RegexDetector(parts.credit.config.planning.grams)
    turns = [
        turn.token_ids
        for group in batch.groups
        for one in group.trajectories
        for turn in one.completions
    ]
    masks = detector.detect_all([parts.text.vocabulary.pieces(ids) for ids in turns])
    return np.concatenate([np.zeros(0, np.uint8), *masks]).astype(np.bool_)


# -- held-out answers ------------------------------------------------------------------------------


def _gold_gradient(parts: Parts, backend: LocalBackend) -> Float64Array | None:
    """[D] gradient of minus the mean log-prob of held-out answers, given their prompts alone; None
    where the run has no held-out problems with answers.
    """
    if parts.evaluator is None:
        return None
    answered = [one for one in parts.evaluator.prompts if one.example.reference][:_MAX_GOLD]
    rows = [_gold_row(parts, number, prompt) for number, prompt in enumerate(answered)]
    if not rows:
        return None
    # With its own log-probs as the sampler's every ratio is 1, and its gradient the log-prob's.
    scored = backend.logprobs(rows)
    rows = [replace(row, logprobs=own) for row, own in zip(rows, scored, strict=True)]
    plain: dict[str, object] = {
        "loss.mode": "importance_sampling",
        "loss.aggregation": "sum",
        "loss.kl_coef": 0.0,
        "loss.entropy_coef": 0.0,
        "loss.correction": "none",
        "loss.old_logprobs": "sampler",
    }
    if parts.credit.config.loss.params:
        plain |= {"loss.params": {}}
    config = replaced(parts.credit.config, plain)
    (gradient,) = backend.gradients(config, rows, 0, [range(len(rows))])
    return gradient.astype(np.float64) / len(rows)


def _gold_row(parts: Parts, number: int, prompt: Prompt) -> Row:
    text = gold_response(prompt.example.reference)
    answer = np.array(parts.text.tokenizer.encode(text, add_special_tokens=False), np.int32)
    start = len(prompt.token_ids)
    return Row(
        token_ids=np.concatenate([prompt.token_ids, answer]),
        spans=((start, start + len(answer)),),
        logprobs=np.zeros(len(answer), np.float32),
        advantages=np.ones(len(answer), np.float32),
        group=number,
    )
