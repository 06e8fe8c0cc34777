"""Interim looks after every seed: which runs of a campaign with stop = "evidence" still start, and
when the campaign ends.

The rule takes the look at a seed once all needed runs of that seed have ended, in the order of the
seeds. The decision of a look depends only on these runs, so a campaign that resumes after a kill
decides the same. The manifest stores the looks, and a resumed campaign does not repeat them.

The look at a seed leaves out a run that failed or stopped: the test bets nothing on its pair. A
resumed campaign tries that run again. If the run now ends, the campaign looks at the seed once
more, at the missing pairs only. A run has one result however often the campaign tries it, so trying
again selects no result. Like every comparison among finished runs, this one assumes that a failure
does not depend on how good the run would have been.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from math import ceil

from retrain.analysis.compare import Comparison, compare_campaign
from retrain.analysis.measures import difference_words
from retrain.analysis.planned import CampaignRecord, InterimAnalysis
from retrain.analysis.verdict import TestSettings, Verdict
from retrain.campaign.manifest import Manifest, Status
from retrain.campaign.plan import CampaignPlan, CampaignRun
from retrain.errors import ConfigurationError
from retrain.records.terminal import counted

_WITHOUT_RESULT = {Status.FAILED, Status.INTERRUPTED}
_ENDED = {Status.DONE, *_WITHOUT_RESULT}


class EvidenceRule:
    """Looks as soon as it can, drops decided conditions, and says when every condition has a
    decision.
    """

    def __init__(
        self, plan: CampaignPlan, manifest: Manifest, workers: int, say: Callable[[str], None]
    ) -> None:
        """`workers` run at a time. An idle worker takes a run of a later seed, unless there is one
        worker for every run.
        """
        self._plan = plan
        self._manifest = manifest
        self._say = say
        if workers >= len(plan.runs):
            self._ahead = 1
        else:
            self._ahead = 1 + ceil((workers - 1) / len(plan.conditions))
        self._record = CampaignRecord.read(plan.folder)
        self._place = {seed: place for place, seed in enumerate(plan.seeds)}
        self._runs = {(run.condition, run.seed): run for run in plan.runs}

    def _missing(self, seed: int) -> list[str]:
        """Return the undecided conditions without a pair in the looks at a seed."""
        return [
            condition
            for condition in self._record.undecided
            if seed not in self._record.looks_of(condition)
        ]

    def needs(self, run: CampaignRun) -> bool:
        """True for a run that a later look would use."""
        wanted = (
            self._missing(run.seed) if run.seed in self._record.looked else self._record.undecided
        )
        return run.condition in wanted or (
            bool(wanted) and run.condition == self._plan.conditions[0]
        )

    def may_start(self, run: CampaignRun) -> bool:
        """True for a needed run whose turn has come."""
        return self.needs(run) and self._place[run.seed] < len(self._record.looked) + self._ahead

    def look(self) -> None:
        """Take the looks that are due."""
        while (seed := self._due()) is not None:
            self._record = replace(self._record, looks=[*self._record.looks, self._take(seed)])
            self._manifest.looks = [asdict(look) for look in self._record.looks]
            self._manifest.write_if_possible()
            seeds = counted(len(self._record.looked), "seed")
            if not self._record.undecided:
                self._say(f"Decided after {seeds} of at most {len(self._plan.seeds)}.")
            elif len(self._record.looked) == len(self._plan.seeds):
                self._say(f"All {seeds} are in. Not decided: {', '.join(self._record.undecided)}.")

    def _due(self) -> int | None:
        """Return the seed to look at now: a seed whose failed run now has a result, or else the
        next seed. The result is None if every condition has a decision or runs of that seed have
        not ended.
        """
        if not self._record.undecided:
            return None
        again = [seed for seed in self._record.looked if self._missing(seed)]
        if not all(self._has_ended(seed) for seed in again):
            return None
        recovered = [seed for seed in again if set(self._missing(seed)) - set(self._failed(seed))]
        following = [seed for seed in self._plan.seeds if seed not in self._record.looked][:1]
        return next(iter([*recovered, *filter(self._has_ended, following)]), None)

    def _has_ended(self, seed: int) -> bool:
        return all(
            self._status(run) in _ENDED
            for run in self._plan.runs
            if run.seed == seed and self.needs(run)
        )

    def _failed(self, seed: int) -> list[str]:
        """Return the undecided conditions with a run in this seed's pair that has no result."""
        baseline = self._plan.conditions[0]
        pairs = {
            condition: [self._runs[label, seed] for label in (condition, baseline)]
            for condition in self._record.undecided
        }
        return [
            condition
            for condition, pair in pairs.items()
            if _WITHOUT_RESULT.intersection(map(self._status, pair))
        ]

    def _status(self, run: CampaignRun) -> Status:
        return self._manifest[run.name].status

    def _take(self, seed: int) -> InterimAnalysis:
        # The comparison reads the looks, so this look is among them before its result.
        look = InterimAnalysis(seed, {}, {}, self._failed(seed))
        record = replace(CampaignRecord.read(self._plan.folder), looks=[*self._record.looks, look])
        name = (
            f"Look {len(record.looks)} (seed"
            f" {seed}{', whose failed run was tried again' if seed in self._record.looked else ''})"
        )
        try:
            comparison = compare_campaign(self._plan.folder, TestSettings(), record=record)
        # The look has no pair so far; the comparison at the end says why.
        except ConfigurationError:
            self._say(f"{name}: no pair yet, since runs have no result.")
            return look
        if comparison.test.rule != "evidence":
            self._say(f"{name} decides nothing. {comparison.planned}")
            return look
        look = self._judged(look, comparison)
        for line in self._lines(look, comparison):
            self._say(f"{name}: {line}")
        return look

    def _judged(self, look: InterimAnalysis, comparison: Comparison) -> InterimAnalysis:
        # Over the whole family: a decided condition has its evidence still, and bets no more.
        open_now = {
            contrast.condition: contrast.conclusion
            for contrast in comparison.contrasts
            if contrast.condition in self._record.undecided
        }
        return replace(
            look,
            evidence={name: round(found.evidence or 0.0, 4) for name, found in open_now.items()},
            decided={
                name: str(found.verdict)
                for name, found in open_now.items()
                if found.verdict is not Verdict.INCONCLUSIVE
            },
        )

    def _lines(self, look: InterimAnalysis, comparison: Comparison) -> Iterator[str]:
        """Yield a line for each condition, such as "maxrl+none +8.2 pp, evidence 12.4 of 20"."""
        for contrast in comparison.contrasts:
            condition = contrast.condition
            if condition not in look.evidence:
                continue
            shown = difference_words(contrast.conclusion.mean, comparison.metric)
            line = (
                f"{condition} {shown}, evidence {look.evidence[condition]:.3g} of"
                f" {1 / comparison.test.alpha:g}"
            )
            yield line + (f": {look.decided[condition]}." if condition in look.decided else ".")
