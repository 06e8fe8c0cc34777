"""Looking after every seed: which runs of a campaign with stop = "evidence" still start, and when it ends.

A seed is looked at once all of its needed runs have ended, in the order of the seeds. What a look decides depends only on these runs, so
a campaign that was killed and resumed decides the same. The looks are stored in the manifest and are not taken again: a run that failed
before the look at its seed stays lost, since trying it again after seeing the others would choose among results.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from math import ceil

from retrain.analysis.compare import Comparison, compare_campaign
from retrain.analysis.e_process import chance_to_decide, evidence
from retrain.analysis.headline import difference_words
from retrain.analysis.planned import CampaignRecord, Look
from retrain.analysis.verdict import TestSettings, Verdict
from retrain.campaign.manifest import Manifest, Status
from retrain.campaign.plan import CampaignPlan, CampaignRun
from retrain.errors import ConfigurationError
from retrain.records.printing import counted


class EvidenceRule:
    """Looks as soon as it can, drops decided conditions, and says when nothing is left to decide."""

    def __init__(self, plan: CampaignPlan, manifest: Manifest, workers: int, say: Callable[[str], None]) -> None:
        """`workers` run at a time. A worker that would be idle takes a run of a later seed, unless there is one worker for every run."""
        self._plan = plan
        self._manifest = manifest
        self._say = say
        self._ahead = 1 if workers >= len(plan.runs) else 1 + ceil((workers - 1) / len(plan.conditions))
        self._looks = CampaignRecord.read(plan.folder).looks
        self._place = {seed: place for place, seed in enumerate(plan.seeds)}

    @property
    def over(self) -> bool:
        """True once every condition is decided, or every seed was looked at."""
        return not self._undecided or len(self._looks) == len(self._plan.seeds)

    @property
    def _undecided(self) -> list[str]:
        decided = {condition for look in self._looks for condition in look.decided}
        return [condition for condition in self._plan.conditions[1:] if condition not in decided]

    def needs(self, run: CampaignRun) -> bool:
        """False for a run that no look to come would use."""
        wanted = run.condition == self._plan.conditions[0] or run.condition in self._undecided
        return wanted and not self.over and self._place[run.seed] >= len(self._looks)

    def may_start(self, run: CampaignRun) -> bool:
        """True for a run that is needed and whose turn has come."""
        return self.needs(run) and self._place[run.seed] < len(self._looks) + self._ahead

    def look(self) -> None:
        """Take the looks that are due."""
        while not self.over and self._is_due(seed := self._plan.seeds[len(self._looks)]):
            self._looks = [*self._looks, self._take(seed)]
            self._manifest.looks = [asdict(look) for look in self._looks]
            self._manifest.write_if_possible()
            if self.over:
                self._say(self._last_line())

    def _is_due(self, seed: int) -> bool:
        runs = [run for run in self._plan.runs if run.seed == seed and self.needs(run)]
        return all(self._manifest[run.name].status in (Status.DONE, Status.FAILED) for run in runs)

    def _take(self, seed: int) -> Look:
        looks = [*self._looks, Look(seed, {}, {}, {})]
        try:
            record = replace(CampaignRecord.read(self._plan.folder), looks=looks)
            comparison = compare_campaign(self._plan.folder, TestSettings(), record=record)
        except ConfigurationError:  # no pair so far; the comparison at the end says why
            self._say(f"Look {len(looks)} of at most {len(self._plan.seeds)} (seed {seed}): no pair yet, since runs failed.")
            return looks[-1]
        if comparison.test.rule != "evidence":
            self._say(f"Look {len(looks)} (seed {seed}) decides nothing. {comparison.planned}")
            return looks[-1]
        look = self._look_at(comparison, seed)
        for line in self._lines(look, comparison):
            self._say(line)
        return look

    def _look_at(self, comparison: Comparison, seed: int) -> Look:
        undecided = set(self._undecided)
        found = evidence([contrast.differences for contrast in comparison.contrasts], comparison.test.looks)
        shown = {contrast.condition: (contrast, value) for contrast, value in zip(comparison.contrasts, found, strict=True)}
        open_now = {condition: pair for condition, pair in shown.items() if condition in undecided}
        verdicts = {condition: contrast.conclusion.verdict for condition, (contrast, _) in open_now.items()}
        left = len(self._plan.seeds) - len(comparison.test.looks)
        bar = len(undecided) / comparison.test.alpha
        return Look(
            seed,
            {condition: round(value, 4) for condition, (_, value) in open_now.items()},
            {
                condition: round(chance_to_decide(list(contrast.differences.values()), left, bar), 2)
                for condition, (contrast, _) in open_now.items()
                if verdicts[condition] is Verdict.INCONCLUSIVE and len(contrast.differences) > 2
            },
            {condition: str(verdict) for condition, verdict in verdicts.items() if verdict is not Verdict.INCONCLUSIVE},
        )

    def _lines(self, look: Look, comparison: Comparison) -> Iterator[str]:
        """For example: Look 3 (seed 202): maxrl+none +8.2 pp, evidence 12.4 of 20, chance to decide by the last seed 71%."""
        number, last = len(comparison.test.looks), len(self._plan.seeds)
        for contrast in comparison.contrasts:
            condition = contrast.condition
            if condition not in look.evidence:
                continue
            shown = difference_words(contrast.conclusion.mean, comparison.metric)
            line = f"Look {number} of at most {last} (seed {look.seed}): {condition} {shown}"
            line += f", evidence {look.evidence[condition]:.3g} of {1 / comparison.test.alpha:g}"
            if condition in look.chance:
                line += f"; at this rate, {100 * look.chance[condition]:.0f}% to decide by the last seed"
            yield line + (f": {look.decided[condition]}." if condition in look.decided else ".")

    def _last_line(self) -> str:
        seeds = counted(len(self._looks), "seed")
        if self._undecided:
            return f"All {seeds} were looked at; not decided: {', '.join(self._undecided)}."
        return f"Decided after {seeds} of at most {len(self._plan.seeds)}."
