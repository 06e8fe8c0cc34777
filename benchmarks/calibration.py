"""False-positive rate, power and interval coverage of `retrain compare`: `python benchmarks/calibration.py` (about two minutes).

The campaigns are simulated. Each seed has its own prompts of different difficulty, and each run a normal shift in logits that all its
completions share. The arms of a seed see the same prompts unless a row says otherwise. tests/test_compare_calibration.py checks the same
with fewer campaigns.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from report import add_output, load_average, publish, table
from scipy import stats

from retrain.analysis import power
from retrain.analysis.statistics import t_interval
from retrain.analysis.tasks import hierarchical_interval
from retrain.analysis.verdict import Paired, TestSettings, Verdict, conclude

PROMPTS, COMPLETIONS = 8, 16
PROMPT_SD = 1.1
"""Standard deviation of the prompts' difficulty, in logits."""
RULES = TestSettings()

Counts = npt.NDArray[np.int64]
Random = np.random.Generator


def right_answers(rng: Random, arms: int, seeds: int, *, run_sd: float = 0.3, effect: float = 0.0, shared_prompts: bool = True) -> Counts:
    """[arms, seeds] right answers of PROMPTS * COMPLETIONS; every arm but the first is better by `effect` logits."""
    prompts = rng.normal(0, PROMPT_SD, (1 if shared_prompts else arms, seeds, PROMPTS))
    luck = rng.normal(0, run_sd, (arms, seeds, 1))
    shift = np.where(np.arange(arms) > 0, effect, 0.0)[:, np.newaxis, np.newaxis]
    right: Counts = rng.binomial(COMPLETIONS, 1 / (1 + np.exp(-(prompts + luck + shift)))).sum(axis=2)
    return right


def verdicts(campaign: Counts) -> list[Verdict]:
    """The verdict on each arm against the first."""
    rates = campaign / (PROMPTS * COMPLETIONS)
    return [found.verdict for found in conclude([Paired.of(list(arm - rates[0])) for arm in rates[1:]], RULES)]


def fisher_rejects(campaign: Counts) -> bool:
    """Fisher's exact test on two arms, with all completions pooled as if they were independent."""
    total = campaign.shape[1] * PROMPTS * COMPLETIONS
    one, two = campaign.sum(axis=1)
    return bool(stats.fisher_exact([[one, total - one], [two, total - two]]).pvalue < RULES.alpha)


# -- tables --------------------------------------------------------------------------------------------------------------


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
        drawn = [right_answers(rng, arms, seeds, run_sd=run_sd, shared_prompts=shared) for _ in range(campaigns)]
        wrong = np.mean([any(verdict is not Verdict.INCONCLUSIVE for verdict in verdicts(campaign)) for campaign in drawn])
        fisher = f"{100 * np.mean([fisher_rejects(campaign) for campaign in drawn]):.1f}%" if arms == 2 else ""
        same = "the same" if shared else "different"
        yield [seeds, arms - 1, run_sd, same, f"{100 * wrong:.1f}%", fisher]


def found_effects(campaigns: int) -> Iterator[list[object]]:
    for seeds, family in ((6, 1), (8, 1), (8, 4), (10, 1), (11, 1), (12, 4), (16, 1), (16, 4)):
        effect = power.minimal_detectable_effect(seeds, 1.0, comparisons=family)
        assert effect is not None
        rng = np.random.default_rng(seeds)
        for share in (0.6, 1.0):
            found = 0
            for _ in range(campaigns):
                # Only the first arm has an effect; Holm's procedure tests it first.
                differences = rng.normal(0, 1, (family, seeds))
                differences[0] += share * effect
                found += conclude([list(row) for row in differences], RULES)[0].verdict is Verdict.IMPROVEMENT
            predicted = power.power_of(seeds, share * effect, comparisons=family)
            yield [seeds, family, f"{share * effect:.2f}", f"{100 * predicted:.1f}%", f"{100 * found / campaigns:.1f}%"]


def covered_effects(campaigns: int) -> Iterator[list[object]]:
    """The effect differs between problems and has mean 0 over all of them; each campaign draws 40, the same for every run."""
    intervals: dict[str, Callable[[Counts, Counts, Counts], tuple[float, float]]] = {
        "t over the runs (new seeds, the same problems)": lambda a, b, k: t_interval((a / k - b / k).mean(axis=1)),
        "bootstrap, problems drawn for each seed": nested_interval,
        "bootstrap, problems drawn once for all seeds (`problem_interval`)": lambda a, b, k: hierarchical_interval(a, b, k, k),
    }
    rng = np.random.default_rng(0)
    covered = dict.fromkeys(intervals, 0)
    for _ in range(campaigns):
        effects = np.clip(rng.normal(0.0, 0.2, 40), -0.4, 0.4)
        baseline, candidate = (rng.binomial(4, 0.5 + shift, (8, 40)) for shift in (0.0, effects))
        for name, interval in intervals.items():
            low, high = interval(candidate, baseline, np.full((8, 40), 4))
            covered[name] += low <= 0 <= high
    for name, count in covered.items():
        yield [name, f"{100 * count / campaigns:.1f}%"]


def nested_interval(candidate: Counts, baseline: Counts, samples: Counts) -> tuple[float, float]:
    """A bootstrap that draws the problems anew for every seed; for the table only."""
    rng = np.random.default_rng(0)
    seeds, problems = candidate.shape
    values = []
    for _ in range(1000):
        rows = rng.integers(0, seeds, (seeds, 1))
        cells = rows, rng.integers(0, problems, (seeds, problems))
        a, b = (rng.binomial(samples[cells], arm[cells] / samples[cells]) / samples[cells] for arm in (candidate, baseline))
        values.append(np.mean(a - b))
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def paragraphs(campaigns: int) -> Iterator[str]:
    error = 100 * 1.96 * np.sqrt(0.05 * 0.95 / campaigns)
    yield "## Where nothing differs"
    yield f"{campaigns} campaigns per row; at a true rate of 5% the table would vary by {error:.1f} points."
    head = ["seeds", "comparisons", "sd between runs (logits)", "prompts", "any false verdict", "Fisher on pooled completions"]
    yield table(head, false_verdicts(campaigns))
    yield "## Power"
    yield f"{campaigns} campaigns per row, normal differences; the second row of each pair is the minimal detectable effect at 80%."
    yield table(["seeds", "comparisons", "effect (sd of the differences)", "predicted", "found"], found_effects(campaigns))
    yield "## Intervals where the effect differs between problems"
    yield f"{campaigns // 10} campaigns of 8 seeds and 40 problems, 4 samples each."
    yield table(["95% interval", "covers the mean over all problems"], covered_effects(campaigns // 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaigns", type=int, default=2000, help="simulated campaigns per row")
    add_output(parser)
    arguments = parser.parse_args()
    load, started = load_average(), time.monotonic()
    found = [*paragraphs(arguments.campaigns), f"numpy {np.__version__}, one core; {time.monotonic() - started:.0f} s in all."]
    publish("calibration", "Calibration of comparisons", found, load, arguments.output)


if __name__ == "__main__":
    main()
