"""Write the sentences of a comparison: the conclusion of each contrast, the caveats, and the
computation of the numbers.
"""

from collections.abc import Iterator

from retrain.analysis import statistics
from retrain.analysis.compare import Comparison, Contrast
from retrain.analysis.headline import p_words, same_runs_words
from retrain.analysis.measures import (
    difference_words,
    direction_words,
    interval_words,
    size_words,
)
from retrain.analysis.pairs import outlying_seeds
from retrain.analysis.power import at_least, finds, minimal_detectable_effect
from retrain.analysis.verdict import FEW_PROBLEMS, Verdict
from retrain.records.terminal import counted

_MIN_CORRELATED = 6
"""Least number of pairs for which a comparison shows the correlation; with three pairs it is mostly
chance.
"""
_DIFFERENCES = (Verdict.IMPROVEMENT, Verdict.WORSE, Verdict.DIFFERENT)


def explanation(contrast: Contrast, comparison: Comparison) -> list[str]:
    """Return the conclusion of one contrast: its verdict with the numbers behind it, and the reason
    why it has none.
    """
    metric, test, found = comparison.metric, comparison.test, contrast.conclusion
    shown = f"{difference_words(found.mean, metric)} in {counted(found.pairs, 'pair')}"
    if lost := lost_words(contrast, comparison):
        shown += f" ({lost} left out)"
    if found.verdict is Verdict.INCONCLUSIVE:
        why = _why_inconclusive(contrast, comparison)
        return [f"{found.word}: {shown}.", *filter(None, [why])]
    if found.verdict is Verdict.EQUIVALENT:
        within = size_words(test.margin, metric)
        p = p_words(found.equivalence_p_adjusted)
        return [f"equivalent within {within}: {shown}, adjusted p {p} (TOST)."]
    within = f", but within the margin of {size_words(test.margin, metric)}" * found.within_margin
    return [f"{found.verdict}{within}: {shown}, adjusted p {p_words(found.p_adjusted)}."]


def lost_words(contrast: Contrast, comparison: Comparison) -> str:
    """Return the number of runs of each condition without a pair, such as "1 failed of grpo+none";
    "" without any.
    """
    parts = []
    for arm in comparison.arms:
        lost = {"failed": arm.failed, "collapsed": arm.collapsed}
        if arm.lost and arm in (contrast.candidate, contrast.base):
            fallen = (f"{len(seeds)} {what}" for what, seeds in lost.items() if seeds)
            parts.append(f"{' and '.join(fallen)} of {arm.label}")
    return ", ".join(parts)


def _why_inconclusive(contrast: Contrast, comparison: Comparison) -> str:
    metric, test, found = comparison.metric, comparison.test, contrast.conclusion
    family = counted(comparison.family, "comparison")
    if found.unsure:
        return _why_unsure(contrast, comparison)
    if found.evidence is not None:
        return f"The evidence is {found.evidence:.3g} over {family}; {1 / test.alpha:g} decides."
    if not found.can_conclude:
        return (
            f"With {counted(found.pairs, 'pair')} the smallest possible adjusted p is"
            f" {p_words(found.smallest_p_adjusted)};"
            f" {at_least(comparison.seeds_to_conclude, comparison.family, test.alpha)} seeds."
        )
    if not found.sd:
        return "All differences are equal, so the data do not show how large chance is."
    interval_alone = ""
    if found.interval and not found.interval[0] <= 0 <= found.interval[1]:
        p = f"adjusted p over {family}" if len(comparison.contrasts) > 1 else "p"
        interval_alone = (
            f"Its own interval excludes 0, but the {p}, {p_words(found.p_adjusted)}, is not below"
            f" {test.alpha:g}. "
        )
    if found.detectable is None:
        return interval_alone
    # Use both ends of the sd's interval: the observed sd alone would overstate the power.
    low, high = (size_words(end, metric).removesuffix(" pp") for end in found.detectable)
    unit = " points" if metric.is_rate else ""
    return (
        f"{interval_alone}With {counted(found.pairs, 'seed')}, a true difference of {high}{unit}"
        f" would be found with at least {100 * test.power:g}% power, one below {low}{unit} with"
        " less."
    )


def _why_unsure(contrast: Contrast, comparison: Comparison) -> str:
    """Return why a significant difference is not a verdict: unjudged answers, or few problems."""
    metric, found = comparison.metric, contrast.conclusion
    p = p_words(found.p_adjusted)
    if found.unsure == "lost":
        return (
            f"The remaining pairs agree (adjusted p {p}), but more than a quarter of a condition's"
            " runs failed or collapsed: fix the cause and train those runs again."
        )
    if found.unsure == "unjudged":
        return (
            f"Without the unjudged answers the difference is significant (adjusted p {p}). They"
            f" leave {interval_words(found.bounds, metric)} possible, and counted against the"
            " difference they undo it."
        )
    problems = counted(comparison.problems, "problem")
    agree = f"The seeds agree (adjusted p {p})"
    if contrast.wide is None:
        return (
            f"{agree}, but {problems} with so few judged answers have no interval for new"
            " problems. Evaluate on more."
        )
    adjusted = " (wider over the family)" if comparison.family > 1 else ""
    return (
        f"{agree}, but the interval for new problems,"
        f" {interval_words(contrast.wide, metric)}{adjusted}, contains 0: with"
        f" {problems}, fewer than {FEW_PROBLEMS}, a few of them may carry the difference."
        " Evaluate on more."
    )


def remarks(comparison: Comparison) -> tuple[list[list[str]], list[str]]:
    """Return the sentences on each contrast, its conclusion first, and the sentences that several
    contrasts have in common.
    """
    own = [
        [*explanation(contrast, comparison), *_caveats(contrast, comparison)]
        for contrast in comparison.contrasts
    ]
    shared = [one for one in own[0] if len(own) > 1 and all(one in other for other in own)]
    return [[one for one in sentences if one not in shared] for sentences in own], shared


def _caveats(contrast: Contrast, comparison: Comparison) -> Iterator[str]:
    """Yield the caveats of a contrast, one sentence each."""
    metric, test, found = comparison.metric, comparison.test, contrast.conclusion
    if words := same_runs_words(contrast):
        yield f"{words[0].upper()}{words[1:]}."
    if found.bounds and found.unsure != "unjudged":
        yield f"The unjudged answers leave {interval_words(found.bounds, metric)} possible."
    if losses := contrast.losses:
        yield (
            f"Failed and collapsed runs: {losses.candidate} of {contrast.condition},"
            f" {losses.baseline} of {contrast.baseline} (exact p {p_words(losses.p)} that both"
            " lose runs at one rate)."
        )
    yield from _about_outliers(contrast)
    yield from _about_tails(contrast, comparison)
    if found.seeds_needed is not None:
        yield (
            f"To find {size_words(test.effect, metric)} with a power of {100 * test.power:g}%, you"
            f" need {found.seeds_needed} seeds (at the sd of these differences,"
            f" {size_words(found.sd, metric)})."
        )
    pairing = contrast.pairing
    if pairing and found.sd and found.pairs >= _MIN_CORRELATED:
        yield (
            f"Pairing by seed took the sd of the differences from"
            f" {size_words(pairing.unpaired_sd, metric)} to {size_words(found.sd, metric)}"
            f" (correlation {pairing.correlation:.2f})."
        )
    if contrast.shared.is_same:
        yield "No recorded setting differs between the conditions: an A/A comparison."
    elif contrast.shared.differing_keys:
        only = "" if contrast.shared.environment else "only "
        yield f"The conditions differ {only}in {', '.join(contrast.shared.differing_keys)}."


def _about_outliers(contrast: Contrast) -> Iterator[str]:
    found, metric = contrast.differences, contrast.candidate.metric
    if seeds := outlying_seeds(found):
        shown = ", ".join(f"{seed} ({difference_words(found[seed], metric)})" for seed in seeds)
        rest = [found[seed] for seed in found if seed not in seeds]
        one = ("Outlier", "it", "that run")
        name, them, runs = one if len(seeds) == 1 else ("Outliers", "them", "those runs")
        yield (
            f"{name}: seed {shown}; without {them} the mean is"
            f" {difference_words(statistics.mean(rest), metric)}. Look at {runs} first: the test"
            " assumes symmetric differences."
        )


def _about_tails(contrast: Contrast, comparison: Comparison) -> Iterator[str]:
    metric, found = comparison.metric, contrast.conclusion
    # All pairs miss an event in this fraction of the runs with a probability of 5%.
    unseen = 1 - 0.05 ** (1 / found.pairs)
    better = comparison.test.direction(metric.better)
    mean = contrast.candidate.mean
    # Only a gain in a rate can be undone by runs that fall to its end at 0.
    if (
        found.verdict is Verdict.IMPROVEMENT
        and metric.is_rate
        and better == "higher"
        and not contrast.candidate.collapsed
        and mean
        and found.mean / mean < unseen
    ):
        yield (
            f"No run of {contrast.condition} collapsed, but {found.pairs} runs cannot exclude a"
            f" collapse rate of up to {unseen:.0%}. At {found.mean / mean:.0%} the"
            " gain would be gone."
        )
    if found.verdict is Verdict.EQUIVALENT or found.within_margin:
        largest = max(abs(value) for value in contrast.differences.values())
        yield (
            f"The largest difference of a pair is {size_words(largest, metric)}. Equivalence is"
            f" about the mean: {found.pairs} pairs cannot exclude a rare event, such as a collapse,"
            f" in up to {unseen:.0%} of the runs."
        )


def sharing(contrast: Contrast) -> str:
    """Return a sentence on the prompts and the noise that the two runs of a pair shared, and on
    differences between their environments.
    """
    shared = contrast.shared
    if shared.samplers:
        names = " and ".join(f'"{name}"' for name in shared.samplers)
        words = (
            f"Prompts differ by design: [data] sampler = {names} chooses them by their rewards. The"
            " pairs share their seed and the held-out problems."
        )
    elif shared.noise == shared.prompts == shared.pairs:
        words = "Both runs of each pair saw the same prompts and the same sampling noise."
    else:
        words = (
            f"Same prompts in {_of(shared.prompts, shared.pairs)} pairs, shared sampling noise in"
            f" {_of(shared.noise, shared.pairs)}."
        )
    if shared.unrecorded:
        words += (
            f" The training data of {_of(shared.unrecorded, shared.pairs)} pairs was not recorded."
        )
    if shared.environment:
        words += f" The machines, versions or code differ: {', '.join(shared.environment)}."
    return words


def _of(count: int, total: int) -> str:
    return {0: "no", total: "all"}.get(count, f"{count} of {total}")


_LIMITS = {
    "evidence": ("55%", "4.3%", "9.3%"),
    "maxt": ("49 to 98%", "1 to 11%", "6 to 9%"),
}
"""False improvements of the e-process within 16 seeds, and of the exact test after 6 to 16 seeds:
benchmarks/robust.py."""


def known_limits(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on the rate of wrong verdicts when a test's assumptions do not hold; none
    without a verdict.
    """
    if not any(contrast.conclusion.verdict in _DIFFERENCES for contrast in comparison.contrasts):
        return
    collapse, failure, tail = _LIMITS[comparison.test.rule]
    looked = ", looked at after every seed" * (comparison.test.rule == "evidence")
    yield (
        "The test assumes that runs do not collapse or fail. In simulated campaigns with equal"
        f" means{looked}, it reports false improvements in {collapse} if a tenth of one"
        f" condition's runs collapse, in {failure} if its worst fifth fails, and in {tail} if its"
        " differences have a long tail downwards."
    )


def looks_taken(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence for each look: the evidence, and what it decided."""
    for number, look in enumerate(comparison.looks, start=1):
        parts = [
            f"{condition}: evidence {value:.3g} of {1 / comparison.test.alpha:g}"
            + f", {look.decided.get(condition)}" * (condition in look.decided)
            for condition, value in look.evidence.items()
        ]
        parts += [
            f"{condition} without this seed, since a run of it had no result"
            for condition in look.missing
        ]
        yield f"Look {number} (seed {look.seed}): {'; '.join(parts)}."


def _about_size(comparison: Comparison) -> Iterator[str]:
    """Yield the rule behind the sizes that an undecided comparison could have found."""
    rule = comparison.test.of_family(comparison.family)
    found = [one.conclusion for one in comparison.contrasts]
    undecided = {
        one.pairs
        for one in found
        if one.detectable and one.verdict is Verdict.INCONCLUSIVE and not one.unsure
    }
    for pairs in sorted(undecided):
        units = minimal_detectable_effect(pairs, 1.0, rule) or 0.0
        yield (
            f"{finds(pairs, units, rule)}, as `retrain explain` says before the runs. The sizes"
            " above are that at both ends of the 95% interval of this sd."
        )


def computed(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on the computation of the numbers."""
    metric, test = comparison.metric, comparison.test
    judge = f", judged by {comparison.judge}" if comparison.judge else ""
    how = f", sampled at {comparison.evaluated}" if comparison.evaluated else ""
    direction = direction_words(test.direction(metric.better))
    yield (
        f"{metric.description[0].upper()}{metric.description[1:]}{judge}{how}; {direction}. The"
        " unit is the run; runs are paired by seed."
    )
    yield from _about_size(comparison)
    several = comparison.family > 1
    family = counted(comparison.family, "comparison")
    over = f", adjusted over {family} by " * several
    if test.rule == "evidence":
        over += "closed testing" * several
        yield (
            f"p: 1 / the evidence of an e-process after {counted(test.looks, 'look')}, one for each"
            f" seed{over}; valid at every look. Interval: its confidence sequence, not adjusted."
            " Both assume what the exact test assumes, that a difference is as likely as its"
            " negative where nothing differs."
        )
    else:
        over += "joint sign flips of whole seeds (max-T)" * several
        yield f"Interval: Student's t over the seeds, not adjusted. p: exact sign flips{over}."
    if any(contrast.parts for contrast in comparison.contrasts):
        yield (
            "Two sources of noise: the evaluation (eval sd; more problems or samples reduce it) and"
            " the seeds (seed sd; only more seeds reduce it)."
        )
    if any(contrast.wide for contrast in comparison.contrasts):
        level = f", at {100 * (1 - test.alpha / comparison.family):.4g}% (Bonferroni)" * several
        few = f"; with fewer than {FEW_PROBLEMS} problems a verdict needs it too{level}"
        few *= comparison.problems < FEW_PROBLEMS
        yield (
            "The interval for other problems comes from a two-way analysis of variance over seeds"
            f" and problems{few}."
        )
    if any(contrast.conclusion.verdict in _DIFFERENCES for contrast in comparison.contrasts):
        yield (
            "A difference that is reported because it is significant is too large on average"
            " (winner's curse); new seeds show its size."
        )
