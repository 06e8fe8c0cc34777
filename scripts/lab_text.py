r"""The pre-training text of the lab's model: conversations with worked arithmetic, and
number-guessing dialogues.

The arithmetic has the right form, and partial results are wrong with some probability: a smaller
one in a second try, which follows a planning phrase. A model trained on it is often wrong when
sampled at temperature 1, mostly right when greedy, and more often right when it checks.
Reinforcement learning has to discover that. Problems are from the lab's training split only.
"""

import random
from typing import NamedTuple

from retrain.data.lab import FAMILIES, Problem, build_problem
from retrain.types import ChatMessage


class ErrorRates(NamedTuple):
    """Probability that a partial result is deliberately wrong."""

    first_try: float
    second_try: float


ERRORS = (-10, -2, -1, 1, 2, 10)
SECOND_TRY_RATE = 0.25
"""Probability that a solution is worked a second time before the answer is given."""
SECOND_TRY_PHRASES = ("wait, let me check", "let me verify")
FAMILY_WEIGHTS = {"sum3": 0.70, "chain4": 0.10, "product": 0.10, "expression": 0.06}
"""Shares of the families; the rest are guessing dialogues."""
GUESSING_RANGES = (10, 20, 50, 100)
MIN_TURNS, MAX_TURNS = 2, 6


def conversation(rng: random.Random, errors: ErrorRates) -> list[ChatMessage]:
    """One conversation: a problem with its worked solution, or a guessing dialogue."""
    draw = rng.random()
    for family in FAMILIES:
        draw -= FAMILY_WEIGHTS[family]
        if draw < 0:
            problem = training_problem(family, rng)
            return [_user(problem.question), _assistant(solution(problem, rng, errors))]
    return guessing_dialogue(rng)


def training_problem(family: str, rng: random.Random) -> Problem:
    while True:
        problem = build_problem(family, [rng.random() for _ in range(8)])
        if problem.split == "train":
            return problem


def solution(problem: Problem, rng: random.Random, errors: ErrorRates) -> str:
    r"""For example "let me think: 61+58=119. 119+35=154. \boxed{154}"."""
    worked, answer = _work(problem, rng, errors.first_try)
    text = f"let me think: {worked}"
    if rng.random() < SECOND_TRY_RATE:
        worked, answer = _work(problem, rng, errors.second_try)
        text += f" {rng.choice(SECOND_TRY_PHRASES)}: {worked}"
    return f"{text} \\boxed{{{answer}}}"


def _work(problem: Problem, rng: random.Random, error_rate: float) -> tuple[str, int]:
    """The steps as text, and their final value. Later steps use a wrong partial result, as a person
    would.
    """
    value, lines = problem.first, []
    for operation, operand in problem.steps:
        result = Problem(problem.family, value, ((operation, operand),)).values[-1]
        if rng.random() < error_rate:
            result += rng.choice(ERRORS)
        lines.append(f"{value}{operation}{operand}={result}.")
        value = result
    return " ".join(lines), value


def guessing_dialogue(rng: random.Random) -> list[ChatMessage]:
    """A game of two to six guesses, each with the remaining range; guesses near its middle are more
    likely.
    """
    while True:
        highest = rng.choice(GUESSING_RANGES)
        secret, low, high = rng.randint(1, highest), 1, highest
        messages = [_user(f"guess my number from 1 to {highest}")]
        for turn in range(1, MAX_TURNS + 1):
            guess = round(rng.triangular(low, high))
            opening = "let me think: " if turn == 1 else ""
            messages.append(_assistant(f"{opening}{low} to {high}. \\boxed{{{guess}}}"))
            if guess == secret:
                if turn >= MIN_TURNS:
                    return messages
                break
            messages.append(_user("higher" if guess < secret else "lower"))
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)


def _user(content: str) -> ChatMessage:
    return {"role": "user", "content": content}


def _assistant(content: str) -> ChatMessage:
    return {"role": "assistant", "content": content}
