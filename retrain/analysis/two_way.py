"""Two-way analysis of variance of paired differences [seeds, problems]: an interval for new seeds
and new problems, and where the spread between seeds comes from.

Every run answers the same held-out problems, so seeds and problems are crossed. With mean squares
of seeds, problems and residual, Var(mean) = (MS_seed + MS_problem - MS_residual) / (seeds *
problems), whose degrees of freedom are Satterthwaite's. Source: Searle, Casella and McCulloch 1992,
Variance Components, chapter 4; Satterthwaite 1946, doi 10.2307/3002019.
"""

from dataclasses import dataclass

import numpy as np

from retrain.analysis.statistics import Floats

_FILLINGS = 30
"""Passes over the missing cells; each shrinks their error by about the fraction of cells that is
missing."""


@dataclass(frozen=True)
class TwoWay:
    """The mean squares of differences [seeds, problems], two or more of each."""

    seeds: int
    problems: int
    mean: float
    seed_square: float
    problem_square: float
    residual_square: float
    residual_freedom: int

    @classmethod
    def of(cls, differences: Floats) -> "TwoWay | None":
        """Analyse a table; it has NaN where a problem was not judged in both runs of a pair. None
        below two seeds or two problems, or with too few cells.

        A missing cell takes its value from the additive fit of the others and costs a degree of
        freedom (Yates 1933); a problem or a seed without any cell is left out.
        """
        known = ~np.isnan(differences)
        table = differences[known.any(axis=1)][:, known.any(axis=0)]
        seeds, problems = table.shape
        freedom = (seeds - 1) * (problems - 1) - int(np.isnan(table).sum())
        if min(seeds, problems) < 2 or freedom < 1:
            return None
        table = _filled(table)
        rows, columns, mean = table.mean(axis=1), table.mean(axis=0), float(table.mean())
        residual = table - rows[:, np.newaxis] - columns + mean
        return cls(
            seeds=seeds,
            problems=problems,
            mean=mean,
            seed_square=problems * float(rows.var(ddof=1)),
            problem_square=seeds * float(columns.var(ddof=1)),
            residual_square=float((residual**2).sum()) / freedom,
            residual_freedom=freedom,
        )

    @property
    def noise_variance(self) -> float:
        """The part of the variance between a seed's differences that the evaluation makes: its
        problems and samples.
        """
        return min(self.residual_square, self.seed_square) / self.problems

    @property
    def luck_variance(self) -> float:
        """The rest of it, run-to-run (seed) variance, which no larger evaluation removes."""
        return max(0.0, self.seed_square - self.residual_square) / self.problems

    def interval(
        self, confidence: float = 0.95, problem_square: float | None = None
    ) -> tuple[float, float]:
        """The interval of the mean over new seeds and new problems. `problem_square` replaces the
        problems' mean square, as a covariate leaves it.

        Never narrower than Student's intervals over the seeds alone and over the problems alone:
        where a mean square is small by chance, the estimated variance is too.
        """
        from scipy.special import stdtrit

        problem_square = self.problem_square if problem_square is None else problem_square
        quantile, cells = 0.5 + confidence / 2, self.seeds * self.problems
        freedoms = (self.seeds - 1, self.problems - 1, self.residual_freedom)
        squares = (self.seed_square, problem_square, -self.residual_square)
        total = sum(squares)
        halves = [
            float(stdtrit(freedom, quantile)) * np.sqrt(square / cells)
            for freedom, square in zip(freedoms[:2], squares[:2], strict=True)
        ]
        if total > 0:
            freedom = total**2 / sum(
                square**2 / own for square, own in zip(squares, freedoms, strict=True)
            )
            freedom = max(
                freedom, min(freedoms)
            )  # Satterthwaite's falls towards 0 where the mean squares nearly cancel
            halves.append(float(stdtrit(freedom, quantile)) * np.sqrt(total / cells))
        half = float(max(halves))
        return self.mean - half, self.mean + half


def _filled(table: Floats) -> Floats:
    """`table` with its NaN cells at the additive fit of rows and columns."""
    missing = np.isnan(table)
    if not missing.any():
        return table
    filled = np.where(missing, np.nanmean(table), table)
    for _ in range(_FILLINGS):
        fit = filled.mean(axis=1, keepdims=True) + filled.mean(axis=0) - filled.mean()
        filled = np.where(missing, fit, table)
    return filled


def covaried_square(differences: Floats, covariate: Floats) -> float | None:
    """The problems' mean square after regression on `covariate` [problems] and its square, as
    TwoWay.interval takes it.

    The interval is then for new problems that are as hard for the base model as these (Lin 2013,
    arXiv 1208.2301; CUPED, Deng et al. 2013). The square is there because an effect fades where a
    problem is always right or always wrong. None where the covariate does not vary enough.
    """
    seeds, columns = differences.shape[0], np.nanmean(differences, axis=0)
    design = np.stack([np.ones_like(covariate), covariate, covariate**2], axis=1)
    rank = int(np.linalg.matrix_rank(design))
    if rank < 2 or len(columns) <= rank + 1:
        return None
    fitted = design @ np.linalg.lstsq(design, columns, rcond=None)[0]
    return float(seeds * ((columns - fitted) ** 2).sum() / (len(columns) - rank))
