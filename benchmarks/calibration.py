"""False-positive rate, power and interval coverage of `retrain compare`: `python
benchmarks/calibration.py` (about six minutes).

The campaigns are simulated. Each seed has its own prompts of different difficulty, and each run a
normal shift in logits that all its completions share. The arms of a seed see the same prompts
unless a row says otherwise. tests/test_compare_calibration.py checks the same with fewer campaigns.
"""

from collections.abc import Iterable, Iterator

import earlier_rules
import looking
import numpy as np
import numpy.typing as npt
import scenarios
from report import publish_simulation, table
from scipy import stats

from retrain.analysis import power
from retrain.analysis.pairs import run_interval
from retrain.analysis.statistics import TwoWay, t_interval
from retrain.analysis.verdict import PairedDifferences, TestSettings, Verdict, conclude

PROMPTS, COMPLETIONS = 8, 16
PROMPT_SD = 1.1
"""Standard deviation of the prompts' difficulty, in logits."""
RULES = TestSettings()

Counts = npt.NDArray[np.int64]
Random = np.random.Generator


def right_answers(
    rng: Random,
    arms: int,
    seeds: int,
    *,
    run_sd: float = 0.3,
    effect: float = 0.0,
    shared_prompts: bool = True,
) -> Counts:
    """[arms, seeds] right answers of PROMPTS * COMPLETIONS; every arm but the first is better by
    `effect` logits.
    """
    prompts = rng.normal(0, PROMPT_SD, (1 if shared_prompts else arms, seeds, PROMPTS))
    luck = rng.normal(0, run_sd, (arms, seeds, 1))
    shift = np.where(np.arange(arms) > 0, effect, 0.0)[:, np.newaxis, np.newaxis]
    right: Counts = rng.binomial(COMPLETIONS, 1 / (1 + np.exp(-(prompts + luck + shift)))).sum(
        axis=2
    )
    return right


def verdicts(campaign: Counts) -> list[Verdict]:
    """The verdict on each arm against the first."""
    rates = campaign / (PROMPTS * COMPLETIONS)
    return [
        found.verdict
        for found in conclude(
            [PairedDifferences.of(list(arm - rates[0])) for arm in rates[1:]], RULES
        )
    ]


def fisher_rejects(campaign: Counts) -> bool:
    """Fisher's exact test on two arms, with all completions pooled as if they were independent."""
    total = campaign.shape[1] * PROMPTS * COMPLETIONS
    one, two = campaign.sum(axis=1)
    return bool(stats.fisher_exact([[one, total - one], [two, total - two]]).pvalue < RULES.alpha)


# -- tables ----------------------------------------------------------------------------------------


def false_verdicts(campaigns: int) -> Iterator[list[object]]:
    for seeds, arms, run_sd, shared in (
        (6, 2, 0.3, True),
        (8, 2, 0.3, True),
        (16, 2, 0.3, True),
        (8, 2, 0.0, True),
        (8, 2, 0.3, False),
        (8, 5, 0.3, True),
        (16, 5, 0.3, True),
    ):
        rng = np.random.default_rng(seeds + 100 * arms)
        drawn = [
            right_answers(rng, arms, seeds, run_sd=run_sd, shared_prompts=shared)
            for _ in range(campaigns)
        ]
        wrong = np.mean(
            [
                any(verdict is not Verdict.INCONCLUSIVE for verdict in verdicts(campaign))
                for campaign in drawn
            ]
        )
        fisher = (
            f"{100 * np.mean([fisher_rejects(campaign) for campaign in drawn]):.1f}%"
            if arms == 2
            else ""
        )
        same = "the same" if shared else "different"
        yield [seeds, arms - 1, run_sd, same, f"{100 * wrong:.1f}%", fisher]


def found_effects(campaigns: int) -> Iterator[list[object]]:
    for seeds, family in ((6, 1), (8, 1), (8, 4), (10, 1), (11, 1), (12, 4), (16, 1), (16, 4)):
        effect = power.minimal_detectable_effect(seeds, 1.0, power.Rule(family))
        assert effect is not None
        rng = np.random.default_rng(seeds)
        for share in (0.6, 1.0):
            found = 0
            for _ in range(campaigns):
                # Only the first arm has an effect; Holm's procedure tests it first.
                differences = rng.normal(0, 1, (family, seeds))
                differences[0] += share * effect
                found += (
                    conclude([PairedDifferences.of(list(row)) for row in differences], RULES)[
                        0
                    ].verdict
                    is Verdict.IMPROVEMENT
                )
            predicted = power.power_of(seeds, share * effect, power.Rule(family))
            yield [
                seeds,
                family,
                f"{share * effect:.2f}",
                f"{100 * predicted:.1f}%",
                f"{100 * found / campaigns:.1f}%",
            ]


def false_verdicts_by_scenario(campaigns: int) -> Iterator[list[object]]:
    """Any false verdict in a family, by the earlier rules and by today's."""
    for name, scenario in scenarios.NULLS.items():
        for seeds, arms in ((3, 2), (6, 2), (8, 2), (16, 2), (8, 5)):
            rng = np.random.default_rng(1000 * seeds + arms)
            before, after = false_rates(
                (scenario(rng, arms, seeds) for _ in range(campaigns)), campaigns
            )
            yield [name, seeds, arms - 1, f"{100 * before:.1f}%", f"{100 * after:.1f}%"]


def false_rates(drawn: Iterable[scenarios.Campaign], count: int) -> tuple[float, float]:
    before = after = 0
    for campaign in drawn:
        finished, rates = campaign.finished, campaign.rates
        both = [finished[0] & finished[arm] for arm in range(1, len(rates))]
        before += any(
            earlier_rules.differs(
                [(rates[arm] - rates[0])[pairs] for arm, pairs in enumerate(both, start=1)]
            )
        )
        after += any(
            found.verdict is not Verdict.INCONCLUSIVE
            for found in conclude(campaign.family(), RULES)
        )
    return before / count, after / count


def peeked(campaigns: int) -> Iterator[list[object]]:
    """A look after every seed, stopped at the first verdict: the fixed test, and the e-process of
    `stop = "evidence"`.
    """
    for seeds in (8, 16):
        rng = np.random.default_rng(seeds)
        rates = np.array([scenarios.textbook(rng, 2, seeds).rates for _ in range(campaigns)])
        differences = rates[:, 1:] - rates[:, :1]
        fixed, evidence = looking.peeked(differences), looking.decided(differences)[:, 0, -1]
        yield [seeds, f"{100 * fixed.mean():.1f}%", f"{100 * evidence.mean():.1f}%"]


def power_in_a_family(campaigns: int) -> Iterator[list[object]]:
    """One arm of four is better by 1.41 standard deviations of the differences."""
    for seeds in (5, 6, 7, 8, 9):
        rng, found = np.random.default_rng(seeds), 0
        for _ in range(campaigns):
            runs = rng.normal(0, np.sqrt(0.5), (5, seeds))
            runs[1] += np.sqrt(2.0)
            family = [PairedDifferences.of(list(arm - runs[0])) for arm in runs[1:]]
            found += conclude(family, TestSettings())[0].verdict is Verdict.IMPROVEMENT
        predicted = power.power_of(seeds, float(np.sqrt(2.0)), power.Rule(4))
        yield [seeds, f"{100 * found / campaigns:.0f}%", f"{100 * predicted:.0f}%"]


def iqm_coverage(campaigns: int) -> Iterator[list[object]]:
    """A run's luck is in all of its tasks."""
    for runs, tasks in ((3, 4), (5, 8), (12, 4), (12, 8), (30, 4), (30, 8)):
        rng = np.random.default_rng(runs + tasks)
        covered = np.zeros(2)
        for _ in range(campaigns):
            scores = (
                np.linspace(0.1, 0.9, tasks)
                + rng.normal(0, 0.05, (runs, 1))
                + rng.normal(0, 0.02, (runs, tasks))
            )
            for index, (low, high) in enumerate(
                (earlier_rules.iqm_interval(scores), run_interval(scores))
            ):
                covered[index] += low <= 0.5 <= high
        yield [runs, tasks, *(f"{100 * count / campaigns:.1f}%" for count in covered)]


def covered_effects(campaigns: int) -> Iterator[list[object]]:
    """The effect differs between problems by an sd of `spread` and has mean 0 over all of them;
    every run answers the same problems.
    """
    for seeds, problems, samples, spread in (
        (3, 40, 4, 0.2),
        (8, 40, 4, 0.2),
        (16, 40, 4, 0.2),
        (8, 40, 1, 0.0),
        (8, 200, 1, 0.0),
        (8, 200, 4, 0.1),
    ):
        rng = np.random.default_rng(seeds + problems + samples)
        covered, widths = np.zeros(3), np.zeros(3)
        for _ in range(campaigns):
            effects = (
                np.clip(rng.normal(0.0, spread, problems), -0.4, 0.4)
                if spread
                else np.zeros(problems)
            )
            luck = rng.normal(0, 0.02, (2, seeds, 1))
            baseline, candidate = (
                rng.binomial(samples, 0.5 + shift)
                for shift in (luck[0] + np.zeros(problems), luck[1] + effects)
            )
            differences = (candidate - baseline) / samples
            table = TwoWay.of(differences)
            assert table
            intervals = (
                t_interval(differences.mean(axis=1)),
                earlier_rules.problem_interval(candidate, baseline, samples),
                table.interval(),
            )
            covered += [low <= 0 <= high for low, high in intervals]
            widths += [high - low for low, high in intervals]
        shown = (
            f"{100 * count / campaigns:.1f}% ({100 * width / campaigns:.1f} pp)"
            for count, width in zip(covered, widths, strict=True)
        )
        yield [seeds, problems, samples, spread, *shown]


def paragraphs(campaigns: int) -> Iterator[str]:
    error = 100 * 1.96 * np.sqrt(0.05 * 0.95 / campaigns)
    yield "## Where nothing differs"
    yield (
        f"{campaigns} campaigns per row; at a true rate of 5% the table would vary by {error:.1f}"
        " points."
    )
    head = [
        "seeds",
        "comparisons",
        "sd between runs (logits)",
        "prompts",
        "any false verdict",
        "Fisher on pooled completions",
    ]
    yield table(head, false_verdicts(campaigns))
    yield "## Power"
    yield (
        f"{campaigns} campaigns per row, normal differences; the second row of each pair is the"
        " minimal detectable effect at 80%."
    )
    yield table(
        ["seeds", "comparisons", "effect (sd of the differences)", "predicted", "found"],
        found_effects(campaigns),
    )
    yield "## Power in a family"
    yield "One arm of four is better by 1.41 standard deviations of the differences."
    yield table(["seeds", "joint flips (max-T)", "predicted"], power_in_a_family(campaigns))
    yield "## False verdicts outside the textbook"
    yield (
        f"{campaigns // 2} campaigns per row, 200 problems with 1 sample unless the row says"
        " otherwise. Before: the rules of 68cde85. Where only candidates collapse, the means are"
        " equal and the differences are not symmetric, which neither sign flips nor t intervals"
        " are made for: the output names the seed. Where an arm's lowest runs failed, the verdict"
        " is about the runs that finished, and says so."
    )
    yield table(
        ["scenario", "seeds", "comparisons", "before", "after"],
        false_verdicts_by_scenario(campaigns // 2),
    )
    yield "## Looking after every seed"
    yield (
        f"{campaigns} campaigns per row, stopped at the first verdict. Before: the fixed test,"
        ' looked at from the third seed on. After: the e-process of stop = "evidence". Neither'
        " asks for the interval for new problems; benchmarks/looking.py has more campaigns."
    )
    yield table(["most seeds", "before: any false verdict", "after"], peeked(campaigns))
    yield "## Intervals of the interquartile mean over tasks"
    yield "A run's luck is in all of its tasks; coverage of 95% intervals."
    yield table(
        ["runs", "tasks", "before: runs drawn within tasks", "after: runs drawn whole"],
        iqm_coverage(campaigns // 4),
    )
    yield "## Intervals where the effect differs between problems"
    yield (
        f"{campaigns // 4} campaigns per row. Coverage of the mean over all problems by 95%"
        " intervals, and their mean width."
    )
    head = [
        "seeds",
        "problems",
        "samples",
        "sd of the effect",
        "t over the seeds",
        "before: bootstrap",
        "after: two-way analysis of variance",
    ]
    yield table(head, covered_effects(campaigns // 4))


if __name__ == "__main__":
    publish_simulation("calibration", "Calibration of comparisons", __doc__, paragraphs, 2000)
