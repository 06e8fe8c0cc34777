"""The answer of a comparison in one sentence."""

from collections.abc import Sequence

from retrain.analysis.compare import Comparison, Contrast
from retrain.analysis.measures import difference_words, size_words
from retrain.analysis.planned import ALPHA
from retrain.analysis.power import at_least
from retrain.analysis.verdict import Verdict
from retrain.records.terminal import counted

_WORDS = {
    Verdict.IMPROVEMENT: ("beats", "beat", "better"),
    Verdict.WORSE: ("is worse than", "are worse than", "worse"),
    Verdict.DIFFERENT: ("differs from", "differ from", "different"),
    Verdict.EQUIVALENT: ("is equivalent to", "are equivalent to", "equivalent"),
}
"""The verb for one condition and for several, and the word in a list."""
_WHY_UNSURE = {
    "": "",
    "lost": "; more than a quarter of a condition's runs failed or collapsed",
    "unjudged": "; answers that could not be judged leave it open",
    "problems": "; a few of the problems may carry the difference",
}


def answer(comparison: Comparison) -> str:
    """Return the answer in a sentence, such as `1 of 4 conditions beats grpo+none on these 200
    problems: maxrl+none +13.2 pp [+9.1, +17.3] (8 seeds); 3 undecided`.
    """
    so_far = f"So far, with {counted(comparison.to_come, 'run')} still to come: "
    return so_far * bool(comparison.to_come) + (_decided(comparison) or _undecided(comparison))


def _decided(comparison: Comparison) -> str:
    """Return the answer of the contrasts that have a verdict; "" without any."""
    parts: list[str] = []
    for verdict, words in _WORDS.items():
        items = [one for one in comparison.contrasts if one.conclusion.verdict is verdict]
        if items and not parts:
            parts.append(_first_part(verdict, items, comparison))
        elif items:
            parts.append(f"{len(items)} {words[2]}: {_listed(items, comparison)}")
    if not parts:
        return ""
    found = [contrast.conclusion.word for contrast in comparison.contrasts]
    parts += [
        f"{found.count(word)} {word}" for word in ("undecided", "cannot conclude") if word in found
    ]
    return "; ".join(parts) + "."


def _first_part(verdict: Verdict, items: Sequence[Contrast], comparison: Comparison) -> str:
    """Return the sentence's beginning, which names the baseline and the scope of the comparison."""
    several = len(items) > 1
    within = f" within {size_words(comparison.test.margin, comparison.metric)}"
    within *= verdict is Verdict.EQUIVALENT
    if len(comparison.contrasts) == 1:
        one = items[0]
        subject, against = one.condition, one.baseline
        shown = difference_and_interval(one) + _within_margin(one, comparison)
    else:
        subject = f"{len(items)} of {len(comparison.contrasts)} conditions"
        against = "their baselines" if several else "its baseline"
        if comparison.one_baseline:
            against = comparison.baseline
        shown = _listed(items, comparison)
    verb = _WORDS[verdict][several]
    return f"{subject} {verb} {against}{within} {scope(comparison)}: {shown}"


def _listed(items: Sequence[Contrast], comparison: Comparison) -> str:
    return ", ".join(
        item_words(contrast, comparison) + _within_margin(contrast, comparison)
        for contrast in items
    )


def _within_margin(contrast: Contrast, comparison: Comparison) -> str:
    margin = f", within the margin of {size_words(comparison.test.margin, comparison.metric)}"
    return margin * contrast.conclusion.within_margin


def _undecided(comparison: Comparison) -> str:
    """Return the answer if no contrast has a verdict: the design cannot give one, or the data did
    not decide.
    """
    contrasts, one = comparison.contrasts, comparison.contrasts[0]
    # The surest reason first: runs that are the same, a design that is too small, then the data.
    if len(contrasts) == 1 and one.same_runs == one.conclusion.pairs:
        return f"{one.condition} against {one.baseline}: {same_runs_words(one)}."
    if alike := _without_variation(comparison):
        return f"Undecided {scope(comparison)}: {alike}, so there is nothing to compare."
    if not any(contrast.conclusion.can_conclude for contrast in contrasts):
        seeds = max(contrast.conclusion.pairs for contrast in contrasts)
        return (
            f"No verdict: {counted(seeds, 'seed')} {'is' if seeds == 1 else 'are'} too few;"
            f" {at_least(comparison.seeds_to_conclude, len(contrasts), comparison.test.alpha)}."
        )
    if len(contrasts) == 1:
        return (
            f"Undecided {scope(comparison)}: {one.condition} against {one.baseline}"
            f" {difference_and_interval(one)}{_WHY_UNSURE[one.conclusion.unsure]}."
        )
    largest = max(contrasts, key=lambda contrast: abs(contrast.conclusion.mean))
    baseline = comparison.baseline if comparison.one_baseline else "its baseline"
    return (
        f"Undecided {scope(comparison)}: none of {len(contrasts)} conditions is shown to differ"
        f" from {baseline}; the largest difference is"
        f" {item_words(largest, comparison)}."
    )


def _without_variation(comparison: Comparison) -> str:
    """Say that no run solved a problem, or every run all of them; "" otherwise."""
    means = {arm.mean for arm in comparison.arms}
    if not comparison.metric.is_rate or means not in ({0.0}, {1.0}):
        return ""
    if not comparison.problems:
        return f"it is {100 * (means.pop() or 0):g}% in every run"
    return "every run solved all" if 1.0 in means else "no run solved any"


def same_runs_words(contrast: Contrast) -> str:
    """Say how many pairs are the same run, such as "all 6 pairs are the same run, byte for byte";
    "" without any.
    """
    if not contrast.same_runs:
        return ""
    same, pairs = contrast.same_runs, contrast.conclusion.pairs
    if same < pairs:
        return f"{same} of {pairs} pairs {'is' if same == 1 else 'are'} the same run, byte for byte"
    which = "the pair is" if pairs == 1 else f"all {pairs} pairs are"
    return (
        f"{which} the same run, byte for byte: what the two set differently changed nothing here,"
        " or they trained on nothing"
    )


def scope(comparison: Comparison) -> str:
    """Return the scope of a verdict: "on these 200 problems" or "in correct_rate". It adds "among
    the runs that finished" if arms lost runs.
    """
    problems, metric = comparison.problems, comparison.metric
    what = [] if metric.k == 1 else [f"in {metric.name}"]
    if problems:
        what.append("on this one problem" if problems == 1 else f"on these {problems:,} problems")
    among = ""
    if any(
        one.losses and one.losses.candidate != one.losses.baseline for one in comparison.contrasts
    ):
        collapsed = any(arm.collapsed for arm in comparison.arms)
        among = f", among the runs that finished{' and did not collapse' * collapsed}"
    return " ".join(what) + among


def name_of(contrast: Contrast, comparison: Comparison) -> str:
    return contrast.condition + f" against {contrast.baseline}" * (not comparison.one_baseline)


def item_words(contrast: Contrast, comparison: Comparison) -> str:
    return f"{name_of(contrast, comparison)} {difference_and_interval(contrast)}"


def difference_and_interval(contrast: Contrast) -> str:
    """Return the difference in words, such as: +13.2 pp [+9.1, +17.3] (8 seeds)."""
    metric, found = contrast.candidate.metric, contrast.conclusion
    ends = ""
    if found.interval:
        low, high = (difference_words(end, metric).removesuffix(" pp") for end in found.interval)
        ends = f" [{low}, {high}]" if found.sd else " in every pair"
    return f"{difference_words(found.mean, metric)}{ends} ({counted(found.pairs, 'seed')})"


def p_words(value: float | None) -> str:
    """Return a p value in two digits, or in as many as it takes to stay on its side of ALPHA; ""
    for None.
    """
    if value is None:
        return ""
    if value < 1e-4 or value >= 0.995:
        return "<0.0001" if value < 1e-4 else "1"
    shown = (f"{value:.{digits}g}" for digits in range(2, 18))
    return next(words for words in shown if (float(words) < ALPHA) == (value < ALPHA))
