"""The plan of a comparison, which a campaign's manifest holds from before its first run, and the looks that were taken on the way.

A plan is hashed, so that an edit shows. A comparison that differs from it is exploratory: its p is computed as if it had been planned.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from retrain.errors import RunFailed
from retrain.parsing import read_object

ALPHA = 0.05


@dataclass(frozen=True)
class AnalysisPlan:
    """What is decided before the first run."""

    baseline: str
    conditions: tuple[str, ...]
    """The others; each is compared with the baseline."""
    metric: str
    alpha: float
    rule: Literal["seeds", "evidence"]
    """The exact test once after all seeds, or the e-process after every seed."""
    seeds: tuple[int, ...]
    """At most these, in this order."""
    max_steps: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"sha256": self.sha256}


@dataclass(frozen=True)
class Look:
    """One look: what was known after a seed, and what followed."""

    seed: int
    evidence: Mapping[str, float]
    """Condition -> evidence over the family, for those still running; 1 / alpha decides (e_process.adjust)."""
    chance: Mapping[str, float]
    """Condition -> chance to be decided by the last seed if the differences go on as so far. Recorded; it stops nothing."""
    decided: Mapping[str, str]
    """Condition -> its verdict, for those decided at this look; they run no more."""


@dataclass(frozen=True)
class CampaignRecord:
    """The plan and the looks in a campaign's manifest."""

    plan: AnalysisPlan | None
    """None in manifests of versions that recorded none."""
    edited: bool
    """The plan is not the one that was hashed."""
    looks: Sequence[Look]
    seeds: Sequence[int]
    """The seeds of the campaign as it is now."""
    conditions: Sequence[str]
    max_steps: int | None

    @classmethod
    def read(cls, folder: Path) -> "CampaignRecord":
        """Raises RunFailed for a damaged manifest."""
        path = folder / "manifest.json"
        content = read_object(path)
        try:
            stored = content.get("plan")
            plan = None if stored is None else _plan(stored)
            looks = [Look(**look) for look in content.get("looks") or []]
            seeds, conditions = [int(seed) for seed in content.get("seeds") or []], [str(label) for label in content.get("conditions") or []]
        except (TypeError, ValueError, KeyError) as error:
            raise RunFailed(f"{path} has a plan or a look that cannot be read ({error}): the file was changed.") from error
        edited = plan is not None and stored.get("sha256") != plan.sha256
        return cls(plan, edited, looks, seeds, conditions, content.get("max_steps"))

    @property
    def looked(self) -> tuple[int, ...]:
        """The seeds of the looks, in order."""
        return tuple(look.seed for look in self.looks)

    def decided_at(self, condition: str) -> int | None:
        """The number of looks after which the condition was decided; None while it is not."""
        return next((number for number, look in enumerate(self.looks, start=1) if condition in look.decided), None)

    def seeds_of(self, condition: str) -> tuple[int, ...]:
        """The seeds that the e-process of a condition has seen."""
        return self.looked[: self.decided_at(condition)]


def _plan(stored: Mapping[str, Any]) -> AnalysisPlan:
    values = {field.name: stored[field.name] for field in fields(AnalysisPlan)}
    return AnalysisPlan(**values | {name: tuple(values[name]) for name in ("conditions", "seeds")})


def deviations(record: CampaignRecord, *, baseline: str, conditions: Sequence[str], metric: str, alpha: float) -> Iterator[str]:
    """In what a comparison differs from the plan, such as "metric (auc, planned pass@1)"."""
    plan = record.plan
    if plan is None:
        return
    if record.edited:
        yield "the plan itself, which was edited after it was hashed"
    for name, now, planned in (
        ("baseline", baseline, plan.baseline),
        ("metric", metric, plan.metric),
        ("alpha", f"{alpha:g}", f"{plan.alpha:g}"),
        ("max_steps", record.max_steps, plan.max_steps),
    ):
        if now != planned:
            yield f"{name} ({now}, planned {planned})"
    if baseline == plan.baseline and set(conditions) != set(plan.conditions):
        yield f"conditions ({', '.join(conditions)}; planned {', '.join(plan.conditions)})"


def added_seeds(record: CampaignRecord) -> list[int]:
    """Seeds that the campaign has now and the plan did not name."""
    return [] if record.plan is None else [seed for seed in record.seeds if seed not in record.plan.seeds]
