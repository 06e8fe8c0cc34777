"""examples/papers: the gradient that each file gives on one fixed batch is that of its paper's
formula, written out here in float64.

Nothing of the references is shared with retrain: one completion at a time, as the papers write it,
and autograd through log-probs.
"""

import math
import random
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from retrain import load_config, train
from retrain.advantages.pipeline import CreditPipeline
from retrain.backends import ActionTokens
from retrain.backends.local.loss import policy_loss
from retrain.backends.own_loss import aggregation_of, own_function
from retrain.backends.rows import num_completions, row_weights
from retrain.config import TrainConfig, config_from_mapping
from retrain.config.load import replaced
from retrain.config.overrides import deep_merge
from retrain.errors import ConfigurationError
from retrain.records.entries import StepRecord
from retrain.rewards import Scorer, ScoreRequest, build_scorer
from retrain.types import (
    Completion,
    Example,
    FinishReason,
    Group,
    Prompt,
    Row,
    Score,
    Scored,
    Trajectory,
    Turn,
)
from scripts.docs_papers import papers, papers_document
from tests.marks import first_of

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ROOT / "retrain" / "assets" / "papers"
MAX_TOKENS, CACHE, BUFFER = 128, 0.2 * 128, 32
"""Of the files: dapo's cache, and the buffer of the reward `overlong`."""
PLANNED, SPLIT = 4, 3
"""Every fourth token is a planning phrase; an environment's second turn begins after a third of the
tokens."""
LATER = {"spo": "algorithm.advantage_params"}
"""Of a file that keeps something between steps: a key that matters from the second step on."""
EXAMPLE = Example("?", "4")


def mismatch(length: int) -> Tensor:
    """[T] how far a learner's log-probs are from the sampler's: to just outside of icepop's bounds."""
    return 0.45 + 1.25 * torch.arange(length, dtype=torch.float64).cos()


# --- the batch ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A completion as a paper sees it: its reward, and the log-probs [T] of its tokens."""

    reward: float
    new: Tensor
    old: Tensor
    entropies: np.ndarray[Any, Any]
    """[T] of the distributions that the tokens were drawn from; higher near the clip's bounds."""

    @property
    def ratios(self) -> Tensor:
        return (self.new - self.old).exp()


Answers = list[list[Answer]]
"""[prompts][completions]"""
Objective = Callable[[Answers], Tensor]

REWARDS = ((1, 0, 0, 1), (1, 1, 1, 0), (1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 0, 0))
LENGTHS = ((5, 9, 128, 60), (104, 3, 31, 120), (7, 110, 20, 4), (12, 128, 6, 40), (1, 17, 99, 2))
SPREADS = (
    (0.0, 0.3, 3.0, 0.02),
    (0.3, 1e-3, 3.0, 0.1),
    (0.3, 0.3, 0.3, 0.3),
    (0.1, 0.2, 0.1, 2e-3),
    (0.5, 0.1, 0.0, 2e-3),
)
SHIFTS = (
    (4.5e-4, 0, 0.05, 0),
    (0, 0, 0, 2.0e-3),
    (0, 0, 0, 0),
    (0, 0, 0, 0),
    (0, -0.0293, -3.3e-4, 0),
)
"""Of a completion's log-ratios: from just outside of gspo's clip of 3e-4 and 4e-4 and luspo's of
2e-3 and 2.5e-3, on both sides, to beyond cispo's bound of 4."""


def answers(*, on_policy: bool = False) -> Answers:
    """Two prompts are solved or hopeless; three completions lie in the cache of the soft overlong
    penalty.
    """
    draw, other = np.random.default_rng(0), np.random.default_rng(1)

    def answer(reward: float, length: int, spread: float, shift: float) -> Answer:
        old = -draw.exponential(1.5, length).astype(np.float32).astype(np.float64)
        new = np.minimum(old + shift + spread * draw.standard_normal(length), -1e-3)
        entropies = other.exponential(0.5, length) + (abs(abs(new - old) - 0.25) < 0.05)
        leaf = torch.tensor(old if on_policy else new).requires_grad_()
        return Answer(reward, leaf, torch.tensor(old), entropies.astype(np.float32))

    shapes = zip(REWARDS, LENGTHS, SPREADS, SHIFTS, strict=True)
    return [[answer(*shape) for shape in zip(*prompt, strict=True)] for prompt in shapes]


def gradients(batch: Answers) -> Tensor:
    """The gradient of every token's log-prob, [n]; of one that was not used, 0."""
    leaves = [answer.new for prompt in batch for answer in prompt]
    return torch.cat(
        [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    )


# --- the papers -----------------------------------------------------------------------------------


def mixed(batch: Answers) -> Answers:
    """The prompts with right and wrong answers: the others have no advantage and count in no
    mean.
    """
    return [prompt for prompt in batch if len({answer.reward for answer in prompt}) > 1]


def centered(prompt: list[Answer]) -> list[float]:
    rewards = [answer.reward for answer in prompt]
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def over_std(values: list[float], sample: list[float]) -> list[float]:
    return [value / float(np.std(sample, ddof=1)) for value in values]


def standardized(prompt: list[Answer]) -> list[float]:
    return over_std(centered(prompt), [answer.reward for answer in prompt])


def clipped(ratios: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratios * advantage, ratios.clamp(1 - low, 1 + high) * advantage)


def over(
    batch: Answers, advantage: Callable[[list[Answer]], list[float]]
) -> Iterator[tuple[Answer, float]]:
    for prompt in batch:
        yield from zip(prompt, advantage(prompt), strict=True)


def mean_of_answers(term: Callable[[Answer, float], Tensor]) -> Objective:
    """Of the prompts with right and wrong answers, with GRPO's advantages."""

    def objective(batch: Answers) -> Tensor:
        return torch.stack([term(*pair) for pair in over(mixed(batch), standardized)]).mean()

    return objective


def num_tokens(batch: Answers) -> int:
    return sum(len(answer.new) for prompt in batch for answer in prompt)


def num_answers(batch: Answers) -> int:
    return sum(len(prompt) for prompt in batch)


def dapo(batch: Answers) -> Tensor:
    def advantage(prompt: list[Answer]) -> list[float]:
        shaped = []
        for answer in prompt:
            length, penalty = len(answer.new), 0.0
            if length > MAX_TOKENS - CACHE:
                penalty = ((MAX_TOKENS - CACHE) - length) / CACHE
            shaped.append((1.0 if answer.reward else -1.0) + penalty)
        return over_std([value - sum(shaped) / len(shaped) for value in shaped], shaped)

    terms = [
        clipped(answer.ratios, a, 0.2, 0.28).sum() for answer, a in over(mixed(batch), advantage)
    ]
    return sum(terms, torch.tensor(0.0)) / num_tokens(mixed(batch))


def dr_grpo(batch: Answers) -> Tensor:
    terms = [clipped(answer.ratios, a, 0.2, 0.2).sum() for answer, a in over(batch, centered)]
    return sum(terms, torch.tensor(0.0)) / num_answers(batch) / MAX_TOKENS


def lite_ppo(batch: Answers) -> Tensor:
    everything = [answer.reward for prompt in batch for answer in prompt]
    pairs = over(mixed(batch), lambda prompt: over_std(centered(prompt), everything))
    return sum(
        (clipped(answer.ratios, a, 0.2, 0.2).sum() for answer, a in pairs), torch.tensor(0.0)
    ) / num_tokens(mixed(batch))


@mean_of_answers
def gspo(answer: Answer, a: float) -> Tensor:
    s = (answer.new - answer.old).mean().exp()
    return clipped(s, a, 3e-4, 4e-4)


def cispo(batch: Answers) -> Tensor:
    of_prompts = []
    for prompt in mixed(batch):
        terms = [
            (answer.ratios.clamp(max=4.0).detach() * a * answer.new).sum()
            for answer, a in over([prompt], standardized)
        ]
        of_prompts.append(torch.stack(terms).sum() / num_tokens([prompt]))
    return torch.stack(of_prompts).mean()


def rloo(batch: Answers) -> Tensor:
    return reinforce(batch, left_out)


@mean_of_answers
def sapo(answer: Answer, a: float) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    gate = 4 / tau / (1 + (-tau * (answer.ratios - 1)).exp())
    return (gate * a).mean()


@mean_of_answers
def gmpo(answer: Answer, a: float) -> Tensor:
    ratios = (
        answer.ratios.clamp(max=math.exp(0.4)) if a > 0 else answer.ratios.clamp(min=math.exp(-0.4))
    )
    return a * ratios.prod() ** (1 / len(ratios))


def dppo(batch: Answers) -> Tensor:
    terms = []
    for answer, a in over(batch, centered):
        for new, old in zip(answer.new, answer.old, strict=True):
            weight = min(math.exp(new.item() - old.item()), 20.0)
            moved = math.exp(new.item()) - math.exp(old.item())
            masked = (a > 0 and moved > 0.15) or (a < 0 and moved < -0.15)
            terms.append(0.0 * new if masked else weight * a * new)
    return torch.stack(terms).sum() / num_answers(batch) / MAX_TOKENS


def topr(batch: Answers) -> Tensor:
    terms = []
    for answer in (answer for prompt in batch for answer in prompt):
        reward = 1.0 if answer.reward else -1.0
        weight = 1.0 if reward > 0 else min(1.0, answer.ratios.prod().item())
        terms.append(weight * reward * answer.new.sum())
    return torch.stack(terms).mean() / 2 / MAX_TOKENS


def vespo(batch: Answers) -> Tensor:
    terms = []
    for answer, a in over(mixed(batch), standardized):
        c1, c2 = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        w = math.exp(max(-20.0, min(20.0, (answer.new - answer.old).sum().item())))
        terms.append(w**c1 * math.exp(c2 * (1 - w)) * a * answer.new.sum())
    return torch.stack(terms).sum() / num_tokens(mixed(batch))


def reinforce(batch: Answers, advantage: Callable[[list[Answer]], list[float]]) -> Tensor:
    terms = [a * answer.new.sum() for answer, a in over(batch, advantage)]
    return torch.stack(terms).sum() / num_answers(batch) / MAX_TOKENS


def w_reinforce(batch: Answers) -> Tensor:
    return reinforce(batch, lambda prompt: [0.1 if one.reward else -1.0 for one in prompt])


def opo(batch: Answers) -> Tensor:
    def advantage(prompt: list[Answer]) -> list[float]:
        lengths = np.array([len(answer.new) for answer in prompt])
        rewards = np.array([answer.reward for answer in prompt])
        return list(rewards - (lengths * rewards).sum() / lengths.sum())

    return reinforce(batch, advantage)


def asymre(batch: Answers) -> Tensor:
    return reinforce(batch, lambda prompt: [value + 0.1 for value in centered(prompt)])


def pkpo(batch: Answers) -> Tensor:
    """Every set of k answers is as likely; an answer gains what it adds to sets that hold it."""

    def advantage(prompt: list[Answer]) -> list[float]:
        n, k = len(prompt), 2
        gained = []
        for i in range(n):
            others = [j for j in range(n) if j != i]
            sets = list(combinations(others, k - 1))
            hits = [any(prompt[j].reward for j in (i, *some)) for some in sets]
            gained.append(k / n * sum(hits) / len(hits))
        return gained

    return reinforce(batch, advantage)


def reinforce_pp(batch: Answers) -> Tensor:
    of_tokens = np.repeat(
        *zip(*((a, len(one.new)) for one, a in over(batch, centered)), strict=True)
    )
    mean, std = float(np.mean(of_tokens)), float(np.std(of_tokens))
    terms = [
        clipped(answer.ratios, (a - mean) / std, 0.2, 0.2).sum()
        for answer, a in over(batch, centered)
    ]
    return sum(terms, torch.tensor(0.0)) / num_tokens(batch)


def gdpo(batch: Answers) -> Tensor:
    def norm(values: list[float]) -> np.ndarray[Any, Any]:
        spread = np.std(values, ddof=1)
        return (np.array(values) - np.mean(values)) / spread if spread else np.zeros(len(values))

    sums = []
    for prompt in batch:
        over_by = [max(0, len(answer.new) - (MAX_TOKENS - BUFFER)) for answer in prompt]
        penalties = [-min(1.0, count / BUFFER) for count in over_by]
        sums.append(norm([answer.reward for answer in prompt]) + 0.5 * norm(penalties))
    whole = np.concatenate(sums)
    terms = [
        clipped(answer.ratios, (value - whole.mean()) / whole.std(), 0.2, 0.2).sum()
        for prompt, values in zip(batch, sums, strict=True)
        for answer, value in zip(prompt, values, strict=True)
    ]
    return torch.stack(terms).sum() / num_tokens(batch)


def ttrl(batch: Answers) -> Tensor:
    terms = []
    for prompt in batch:
        said = ["right" if answer.reward else "wrong" for answer in prompt]
        vote = max(said, key=said.count)  # of two the first
        agreed = [float(word == vote) for word in said]
        if len(set(agreed)) == 1:
            continue
        advantages = over_std([value - sum(agreed) / len(agreed) for value in agreed], agreed)
        for answer, a in zip(prompt, advantages, strict=True):
            terms.append(clipped(answer.ratios, a, 0.2, 0.2).mean())
    return torch.stack(terms).mean()


def maxrl(batch: Answers) -> Tensor:
    def advantage(prompt: list[Answer]) -> list[float]:
        mean = sum(answer.reward for answer in prompt) / len(prompt)
        return [value / mean if mean else 0.0 for value in centered(prompt)]

    return reinforce(batch, advantage)


@mean_of_answers
def grpo(answer: Answer, a: float) -> Tensor:
    return clipped(answer.ratios, a, 0.2, 0.2).mean()


def luspo(batch: Answers) -> Tensor:
    terms = []
    for answer, a in over(batch, standardized_or_0):
        s = (answer.new - answer.old).mean().exp()
        terms.append(len(answer.new) * clipped(s, a, 2e-3, 2.5e-3))
    return torch.stack(terms).mean() / MAX_TOKENS


@mean_of_answers
def intellect2(answer: Answer, a: float) -> Tensor:
    bounded = answer.ratios.clamp(max=4.0) * a
    return torch.minimum(bounded, answer.ratios.clamp(0.8, 1.2) * a).mean()


def scalerl(batch: Answers) -> Tensor:
    std = float(np.std([value for prompt in batch for value in centered(prompt)]))
    of_prompts = []
    for prompt in mixed(batch):
        terms = [
            (answer.ratios.clamp(max=5.0).detach() * a / std * answer.new).sum()
            for answer, a in over([prompt], centered)
        ]
        of_prompts.append(torch.stack(terms).sum() / num_tokens([prompt]))
    return torch.stack(of_prompts).mean()


@mean_of_answers
def deepseek_v32(answer: Answer, a: float) -> Tensor:
    drift = (answer.old - answer.new).mean().item()
    kept = 0.0 if a < 0 and drift > 1.0 else 1.0
    return kept * clipped(answer.ratios, a, 0.2, 0.2).mean()


@mean_of_answers
def simple_po(answer: Answer, a: float) -> Tensor:
    penalty = abs(a) / 0.4 * (answer.ratios - 1) ** 2
    return (answer.ratios * a - penalty).mean()


def taught(slope: float) -> Objective:
    """Distillation from a teacher of `teacher_logprobs`."""

    def objective(batch: Answers) -> Tensor:
        everything = [answer for prompt in batch for answer in prompt]
        terms = [((slope * one.old - 0.1 - one.old) * one.new).sum() for one in everything]
        return torch.stack(terms).sum() / num_tokens(batch)

    return objective


def clip_cov(batch: Answers) -> Tensor:
    places = [
        (answer, t, a)
        for answer, a in over(batch, standardized_or_0)
        for t in range(len(answer.old))
    ]
    every_a = np.array([a for _, _, a in places])
    every_p = np.array([answer.old[t].item() for answer, t, _ in places])
    covariances = (every_a - every_a.mean()) * (every_p - every_p.mean())
    inside = [n for n, value in enumerate(covariances) if 1 < value < 5]
    count = int(0.01 * len(places))
    left_out = {inside[n * len(inside) // count] for n in range(count)}
    terms = [
        clipped(answer.ratios[t], a, 0.2, 0.2)
        for n, (answer, t, a) in enumerate(places)
        if n not in left_out
    ]
    return torch.stack(terms).sum() / num_tokens(mixed(batch))


def standardized_or_0(prompt: list[Answer]) -> list[float]:
    return standardized(prompt) if mixed([prompt]) else [0.0] * len(prompt)


def rent(batch: Answers) -> Tensor:
    def advantage(prompt: list[Answer]) -> list[float]:
        sure = [-float(np.mean(answer.entropies.astype(np.float64))) for answer in prompt]
        return over_std([value - sum(sure) / len(sure) for value in sure], sure)

    terms = [clipped(answer.ratios, a, 0.2, 0.2).mean() for answer, a in over(batch, advantage)]
    return torch.stack(terms).mean()


@mean_of_answers
def kpo(answer: Answer, a: float) -> Tensor:
    """The filter as the estimate with the least expected square, of Gaussians: the covariance of a
    random walk and its observations, and one linear solve for each token.
    """
    z, estimates = answer.new - answer.old, []
    for t in range(1, len(z) + 1):
        steps = torch.arange(1, t + 1, dtype=torch.float64)
        walk = 1.0 + 0.01 * torch.minimum(steps[:, None], steps[None, :])
        gains = torch.linalg.solve(walk + torch.eye(t), walk[-1])
        estimates.append((gains * z[:t]).sum())
    return clipped(torch.stack(estimates).exp(), a, 0.2, 0.2).mean()


def spo(batch: Answers) -> Tensor:
    """Of a first step, in which every prompt's rate is 1/2."""
    gains = np.array([answer.reward - 0.5 for prompt in batch for answer in prompt])
    mean, std = gains.mean(), gains.std()
    pairs = over(batch, lambda prompt: [(one.reward - 0.5 - mean) / std for one in prompt])
    terms = [clipped(answer.ratios, a, 0.2, 0.28).sum() for answer, a in pairs]
    return torch.stack(terms).sum() / num_tokens(batch)


def dro(batch: Answers) -> Tensor:
    terms = [
        (a * answer.new - 0.25 * (answer.new - answer.old) ** 2).sum()
        for answer, a in over(mixed(batch), centered)
    ]
    return torch.stack(terms).sum() / num_tokens(mixed(batch))


def token_mean(advantage: Callable[[list[Answer]], list[float]]) -> Objective:
    def objective(batch: Answers) -> Tensor:
        pairs = over(mixed(batch), advantage)
        terms = [clipped(answer.ratios, a, 0.2, 0.2).sum() for answer, a in pairs]
        return torch.stack(terms).sum() / num_tokens(mixed(batch))

    return objective


def left_out(prompt: list[Answer]) -> list[float]:
    total = sum(answer.reward for answer in prompt)
    return [answer.reward - (total - answer.reward) / (len(prompt) - 1) for answer in prompt]


def hicra(batch: Answers) -> Tensor:
    terms = []
    for answer, a in over(mixed(batch), centered):
        for t, ratio in enumerate(answer.ratios):
            planned = abs(a) * 0.2 if t % PLANNED == 1 else 0.0
            terms.append(clipped(ratio, a + planned, 0.2, 0.28))
    return torch.stack(terms).sum() / num_tokens(mixed(batch))


@mean_of_answers
def icepop(answer: Answer, a: float) -> Tensor:
    k = mismatch(len(answer.old)).exp()
    mask = torch.where((k >= 0.5) & (k <= 5.0), k, 0.0)
    ratios = (answer.new - answer.old - mismatch(len(answer.old))).exp()
    return (mask * clipped(ratios, a, 0.2, 0.2)).mean()


def gigpo(batch: Answers) -> Tensor:
    """An episode's second turn begins after SPLIT of its tokens, in one of two states."""
    terms = []
    for prompt in batch:
        for i, (answer, a) in enumerate(over([prompt], standardized_or_0)):
            likes = [other.reward for j, other in enumerate(prompt) if j % 2 == i % 2]
            first = a + 0.95 * centered(prompt)[i]
            second = a + answer.reward - sum(likes) / len(likes)
            length = len(answer.new)
            per_token = [first if t < length // SPLIT else second for t in range(length)]
            kept = [clipped(answer.ratios[t], one, 0.2, 0.2) for t, one in enumerate(per_token)]
            terms.append(torch.stack(kept).mean())
    counted = num_answers(mixed(batch))
    return torch.stack(terms).sum() / counted


def forking_tokens(batch: Answers) -> Tensor:
    chosen = mixed(batch)
    everything = np.concatenate([answer.entropies for prompt in chosen for answer in prompt])
    threshold = np.sort(everything)[::-1][int(0.2 * len(everything)) - 1]
    terms = []
    for answer, a in over(chosen, standardized):
        kept = torch.tensor(answer.entropies >= threshold)
        terms.append((kept * clipped(answer.ratios, a, 0.2, 0.28)).sum())
    return torch.stack(terms).sum() / num_tokens(chosen)


learnability = token_mean(left_out)
gkd, opsd = taught(0.5), taught(0.8)
OBJECTIVES: dict[str, Objective] = {
    name: globals()[name] for name in sorted(path.stem for path in PAPERS.glob("*.toml"))
}
"""Of each file the formula of its name, here."""
ON_POLICY = {"rloo", "w_reinforce", "opo", "pkpo", "maxrl", "gkd", "opsd"}
"""Papers whose formula has no ratio, since they make one update per batch."""


# --- retrain --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def imported_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plugin's folder stays on sys.path; here it does not outlive the test, nor do modules named
    after papers.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in OBJECTIVES:
        sys.modules.pop(name, None)


def config_of(name: str) -> TrainConfig:
    return load_config(PAPERS / f"{name}.toml", environ={})


def rows_of(config: TrainConfig, batch: Answers) -> list[Row]:
    """The rows that credit assignment makes of the batch, scored by the file's reward."""
    if config.environment.provider:
        groups = episodes(batch)
    else:
        with build_scorer(config) as scorer:
            groups = groups_of(scorer, batch)
    pipeline = CreditPipeline(config, lambda ids: [" let me think." if one else "." for one in ids])
    return pipeline.assign(groups, 0, 0.0, partial(teacher_logprobs, config)).rows()


def teacher_logprobs(config: TrainConfig, groups: Sequence[Group]) -> np.ndarray:
    """[n] of a made-up teacher: the policy with the answer agrees more than another adapter."""
    slope = 0.8 if config.algorithm.teacher == "answer" else 0.5
    rows = [one.logprobs for group in groups for one in group.trajectories]
    return slope * np.concatenate(rows).astype(np.float64) - 0.1


def prompt_of(slot: int) -> Prompt:
    return Prompt(replace(EXAMPLE, example_id=f"prompt-{slot}"), "?", np.zeros(3, np.int32))


def groups_of(scorer: Scorer, batch: Answers) -> list[Group]:
    groups = []
    for slot, answers_of_prompt in enumerate(batch):
        trajectories, scores = [], []
        asked = scorer.group(len(answers_of_prompt))
        for sample, answer in enumerate(answers_of_prompt):
            length = len(answer.old)
            reason = FinishReason.LENGTH if length == MAX_TOKENS else FinishReason.STOP
            ids = (np.arange(length) % PLANNED == 1).astype(np.int32)
            logprobs = answer.old.numpy().astype(np.float32)
            completion = Completion(slot, sample, ids, logprobs, answer.entropies, reason)
            text = r"\boxed{4}" if answer.reward else r"\boxed{5}"
            request = ScoreRequest(text, "4", "?", EXAMPLE, 0, slot, sample, length, reason)
            trajectories.append(Trajectory.of(completion))
            scores.append(asked.submit(request))
        members = [
            Scored(trajectory, "", score.result())
            for trajectory, score in zip(trajectories, scores, strict=True)
        ]
        groups.append(Group(prompt_of(slot), slot, members))
    return groups


def episodes(batch: Answers) -> list[Group]:
    """The same answers as episodes of two turns, whose second begins in one of two states."""
    groups = []
    for slot, answers_of_prompt in enumerate(batch):
        members = []
        for sample, answer in enumerate(answers_of_prompt):
            logprobs = answer.old.numpy().astype(np.float32)
            turns = []
            for part, state in zip(
                np.split(logprobs, [len(logprobs) // SPLIT]), (None, sample % 2), strict=True
            ):
                ids = np.ones(len(part), np.int32)
                reply = Completion(slot, sample, ids, part, None, FinishReason.STOP)
                context = np.zeros(0, np.int32) if state is None else np.array([7, state], np.int32)
                turns.append(Turn(reply, context))
            members.append(Scored(Trajectory(tuple(turns)), "", Score.of(answer.reward, 0.5)))
        groups.append(Group(prompt_of(slot), slot, members))
    return groups


def descend(config: TrainConfig, batch: Answers) -> None:
    """One backward pass of the loss that the learner takes of the batch in one update."""
    rows = rows_of(config, batch)
    trained = [row for row in rows if row.trained]
    counted = [row.num_counted for row in trained]
    weights = row_weights(
        trained, counted, aggregation_of(config), config.training.max_tokens, num_completions(rows)
    )
    lengths = [row.num_actions for row in trained]
    sampler = torch.cat([torch.tensor(row.logprobs, dtype=torch.float64) for row in trained])
    old = sampler
    if config.loss.old_logprobs == "recomputed":
        old = sampler + torch.cat([mismatch(length) for length in lengths])
    tokens = ActionTokens(
        new=torch.cat([batch[row.group][row.sample].new for row in trained]),
        old=old,
        sampler=sampler,
        advantages=torch.cat(
            [torch.tensor(row.advantages, dtype=torch.float64) for row in trained]
        ),
        weights=torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(lengths)),
        lengths=lengths,
    )
    own = own_function("loss", config)
    policy_loss(tokens, config.loss, own(tokens).values if own else None).backward()


def gradient_of_file(config: TrainConfig, name: str) -> Tensor:
    batch = answers(on_policy=name in ON_POLICY)
    descend(config, batch)
    return -gradients(batch)


def gradient_of_paper(name: str) -> Tensor:
    batch = answers(on_policy=name in ON_POLICY)
    OBJECTIVES[name](batch).backward()
    return gradients(batch)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_of_a_file_is_that_of_its_papers_formula(name: str) -> None:
    """Up to the epsilon beside a standard deviation, 1e-6, and the rows' advantages in float32."""
    wanted = gradient_of_paper(name)
    assert wanted.any()
    assert distance(gradient_of_file(config_of(name), name), wanted) < 1e-5


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_setting_of_a_file_matters_to_its_gradient(name: str) -> None:
    """With any key of the method changed the gradient is another one: none is decoration, and the
    batch would show a wrong value.
    """
    config, wanted = config_of(name), gradient_of_paper(name)

    def is_noticed(change: dict[str, Any]) -> bool:
        try:
            return distance(gradient_of_file(replaced(config, change), name), wanted) > 1e-3
        except ConfigurationError:  # it does not go with another key of the file
            return True

    changes = [
        change for section in ("reward", "algorithm", "loss") for change in changed(section, config)
    ]
    changes = [change for change in changes if LATER.get(name) not in change]
    assert changes and not [change for change in changes if not is_noticed(change)]


def test_no_two_files_have_one_gradient() -> None:
    """To 1e-6, on the same batch: such files would be one with two names."""
    found = {}
    for name in OBJECTIVES:
        batch = answers()
        descend(config_of(name), batch)
        found[name] = -gradients(batch)
    for one, other in combinations(found, 2):
        assert distance(found[one], found[other]) >= 1e-6, (one, other)


def changed(section: str, config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Each key that the file sets in a section: a number larger by a quarter, a name back at its
    default.
    """
    for key in sorted(getattr(config, section).model_fields_set - {"max_grad_norm"}):
        path = f"{section}.{key}"
        value, default = config.value(path), TrainConfig().value(path)
        if isinstance(value, float):
            yield {path: value * 1.25 or 1.0}
        elif isinstance(value, dict):
            yield from (
                {path: {**value, name: item * 1.25} if isinstance(item, int | float) else {}}
                for name, item in value.items()
            )
        elif value != default:
            yield {path: default}


def short_run(name: str, folder: Path, steps: int) -> list[StepRecord]:
    """The first steps of a file with small groups, paid at random where the lab's answers are
    judged; GKD's teacher is the base model.
    """
    changes: dict[str, Any] = {
        "training.max_steps": steps,
        "training.batch_size": 2,
        "training.group_size": 4,
        "training.max_tokens": 8,
        "training.minibatches": 1,
        "training.updates_per_batch": 2,
        "backend.devices": "cpu",
        "logging.log_dir": str(folder / name),
    }
    config = config_of(name)
    if config.environment.provider or name == "rent":  # whose rewards need more than eight tokens
        changes["training.max_tokens"] = 64
    else:
        changes["reward.type"] = "random"
    if name == "gkd":
        changes["algorithm.teacher"] = "base"
    run = train(replaced(config, changes), quiet=True, skip_parity=True)
    return list(run.records())


@pytest.mark.parametrize("name", first_of(path.stem for path in sorted(PAPERS.glob("*.py"))))
def test_a_file_with_a_plugin_beside_it_takes_a_lab_step_that_starts_on_policy(
    name: str, tmp_path: Path
) -> None:
    (step,) = short_run(name, tmp_path, steps=1)
    assert step.loss is not None and math.isfinite(step.loss)
    assert (
        step.logprob_diff_mean is not None and step.logprob_diff_mean < 1e-4
    )  # before the first update, whose ratio is 1


@pytest.mark.slow
def test_six_files_take_two_steps_in_one_process(tmp_path: Path) -> None:
    """A sample with a fixed seed; nothing of one file's run is left in the next."""
    for name in random.Random(29).sample(sorted(OBJECTIVES), 6):
        assert [step.step for step in short_run(name, tmp_path, steps=2)] == [0, 1]


def test_settings_at_the_papers_scale_go_with_the_file() -> None:
    scaled = [paper for paper in papers() if paper.scale]
    assert len(scaled) > 8
    for paper in scaled:
        file = tomllib.loads((PAPERS / f"{paper.stem}.toml").read_text(encoding="utf-8"))
        config_from_mapping(deep_merge(file, tomllib.loads(paper.scale)))


def test_the_page_of_papers_has_not_drifted() -> None:
    assert (ROOT / "docs" / "papers.md").read_text(encoding="utf-8") == papers_document(), (
        "run `make docs`"
    )
