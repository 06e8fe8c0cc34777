"""Held-out evaluation: pass@1 with an interval clustered by problem, and unbiased pass@k.

The unit is the problem, not the sample: samples of one problem are correlated, so the interval uses
the variance of the problems' means.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import sqrt
from typing import Any

import numpy as np

from retrain.records.entries import EvaluationRecord

Z_95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution: a 95% interval is the estimate, plus and minus
this many standard errors."""

MIN_FOR_WILSON = 100
"""With fewer problems a Wilson interval on the effective sample size covers too little: 87% instead
of 95% of some simulated cases."""


@lru_cache(maxsize=4096)
def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased probability that one of k samples is right, given c right ones among n: 1 -
    C(n-c, k) / C(n, k).

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1, in its product form. Raises ValueError
    unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def clustered_interval(means: Sequence[float], samples: int) -> tuple[float, float]:
    """The 95% interval of the mean of per-problem accuracies [n] that rest on `samples` judged
    completions in all.

    A Wilson score interval on the effective sample size p(1-p)/SE**2, SE from the spread of the
    problems' means: it stays inside [0, 1] and does not collapse at 0 or 1. The size is n where
    that spread is zero, and never above `samples`. Below MIN_FOR_WILSON problems, whose spread says
    little, it is the exact interval of a proportion: on the n answers where each problem has one,
    else on the effective size times (z/t)**2 with n - 1 degrees of freedom
    (benchmarks/one_evaluation.py). Sources: Dean and Pagano 2015, doi 10.1093/jssam/smv024; Clopper
    and Pearson 1934; Korn and Graubard 1998, Survey Methodology 24.
    """
    from scipy.special import stdtrit

    n = len(means)
    if n == 0:
        return 0.0, 1.0
    p = float(np.mean(means))
    variance = 0.0
    if n > 1:
        variance = float(np.var(means, ddof=1)) / n
    if variance > 0:
        size = min(p * (1 - p) / variance, float(samples))
    else:
        size = float(n)
    if n >= MIN_FOR_WILSON:
        return wilson_interval(p, size)
    if samples == n or n < 2:
        return exact_interval(p, float(n))
    return exact_interval(p, size * (Z_95 / float(stdtrit(n - 1, 0.975))) ** 2)


def exact_interval(p: float, size: float) -> tuple[float, float]:
    """The 95% interval of Clopper and Pearson for a proportion p of `size` draws, which may be an
    effective number.
    """
    from scipy.special import betaincinv

    right, wrong = p * size, (1 - p) * size
    low = 0.0
    if right > 0:
        low = float(betaincinv(right, wrong + 1, 0.025))
    high = 1.0
    if wrong > 0:
        high = float(betaincinv(right + 1, wrong, 0.975))
    return low, high


def wilson_interval(p: float, size: float) -> tuple[float, float]:
    """The 95% score interval of a proportion p that rests on `size` independent draws, which may be
    an effective number.
    """
    centre = (p + Z_95**2 / (2 * size)) / (1 + Z_95**2 / size)
    half = Z_95 / (1 + Z_95**2 / size) * sqrt(p * (1 - p) / size + Z_95**2 / (4 * size**2))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation. Everything that is reported is computed from its problems, so
    evaluation.jsonl holds all of it.
    """

    step: int
    """Steps completed when the evaluation was made."""
    problems: Sequence[EvaluationRecord]
    ks: Sequence[int] = (1,)
    seconds: float = 0.0
    tokens: int = 0

    @property
    def _judged(self) -> list[EvaluationRecord]:
        return [problem for problem in self.problems if problem.samples]

    @property
    def pass_at(self) -> dict[int, float]:
        """k -> unbiased pass@k, the mean over the problems with at least k judged samples; a k that
        no problem reaches is absent.
        """
        values = {
            k: [
                pass_at_k(item.samples, item.correct, k)
                for item in self._judged
                if item.samples >= k
            ]
            for k in self.ks
        }
        return {k: float(np.mean(rates)) for k, rates in values.items() if rates}

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of pass@1."""
        return self.interval_at(1)

    def interval_at(self, k: int) -> tuple[float, float]:
        """Return the 95% interval of pass@k, for which `samples` answers count as samples // k
        draws of k.
        """
        enough = [item for item in self._judged if item.samples >= k]
        return clustered_interval(
            [pass_at_k(item.samples, item.correct, k) for item in enough],
            sum(item.samples // k for item in enough),
        )

    @property
    def by_task(self) -> dict[str, "Evaluation"]:
        """Task -> the evaluation of its problems, in the order of their first problem."""
        tasks: dict[str, list[EvaluationRecord]] = {}
        for problem in self.problems:
            tasks.setdefault(problem.task, []).append(problem)
        return {task: replace(self, problems=problems) for task, problems in tasks.items()}

    def difference_from(self, before: "Evaluation") -> tuple[float, tuple[float, float]] | None:
        """The mean difference in accuracy over the problems that both have judged, and Student's
        95% interval over these problems.

        None below two shared problems. Paired by problem, so it is narrower than two intervals side
        by side suggest.
        """
        from scipy.special import stdtrit

        rates = {item.example_id: item.correct / item.samples for item in before._judged}
        shared = [item for item in self._judged if item.example_id in rates]
        if len(shared) < 2:
            return None
        d = np.array([item.correct / item.samples - rates[item.example_id] for item in shared])
        half = float(stdtrit(len(d) - 1, 0.975)) * float(d.std(ddof=1)) / sqrt(len(d))
        return float(d.mean()), (float(d.mean()) - half, float(d.mean()) + half)

    def _scores(self) -> dict[str, Any]:
        """Return pass@k and the intervals for summary.json; a task without a judged problem has
        none.
        """
        rates = {f"pass@{k}": rate for k, rate in sorted(self.pass_at.items())}
        return rates | {
            f"{name}_interval": list(self.interval_at(int(name.removeprefix("pass@"))))
            for name in rates
        }

    def summary(self) -> dict[str, Any]:
        """Return the form that summary.json and `retrain eval --json` hold."""
        values: dict[str, Any] = {f"pass@{k}": value for k, value in sorted(self.pass_at.items())}
        values |= {
            f"pass@{k}_interval": list(self.interval_at(k)) for k in sorted(self.pass_at) if k != 1
        }
        tasks = self.by_task
        if len(tasks) > 1:
            values["tasks"] = {
                task: part._scores() | {"problems": len(part.problems)}
                for task, part in tasks.items()
            }
        return values | {
            "interval": list(self.interval),
            "step": self.step,
            "problems": len(self.problems),
            "samples": sum(problem.samples for problem in self.problems),
            "could_not_judge": sum(problem.could_not_judge for problem in self.problems),
        }
