"""What a campaign finds out beside its runs: the rank that its adapters need, and how its conditions compare."""

import shutil
from collections.abc import Callable

from retrain.campaign.manifest import Manifest, Status
from retrain.campaign.plan import CampaignRun, Plan
from retrain.config import TrainConfig, replaced
from retrain.errors import ConfigurationError, EnvironmentFailure, RetrainError
from retrain.records.checkpoint import FINAL
from retrain.run.opening import stored_checkpoints
from retrain.tracking import RunFolder
from retrain.tracking.base import SQUEEZE_RUN, track_squeeze

Say = Callable[[str], None]


class AutoSqueeze:
    """Analyses the first run's adapter, once, where the campaign has `[squeeze]`: printed, into the manifest, and to the trackers.

    An adapter that is still zero says nothing, so the next run's is taken. A failure is said and stops nothing.
    """

    def __init__(self, plan: Plan, manifest: Manifest, say: Say) -> None:
        self._plan = plan
        self._manifest = manifest
        self._say = say
        self._due = plan.config.is_set("squeeze") and manifest.squeeze is None
        self._untrained: set[str] = set()
        """Names of the runs that were passed over."""

    def after(self, run: CampaignRun) -> None:
        """`run` is done: the plan's first one is the one that counts, whichever is done first; where that is untrained, the next."""
        for candidate in self._plan.runs:
            if not self._due or (candidate != run and self._manifest[candidate.name].status is not Status.DONE):
                return
            self._squeeze(candidate)

    def at_end(self) -> None:
        """The first trained run that is done, where the plan's first one failed, or was done before an earlier session was cut."""
        for run in self._plan.runs:
            if self._due and self._manifest[run.name].status is Status.DONE:
                self._squeeze(run)

    def _squeeze(self, run: CampaignRun) -> None:
        from retrain.squeeze import squeeze_adapter
        from retrain.squeeze.analysis import Untrained

        if run.name in self._untrained:
            return
        self._due = False
        self._say(f"LoRA-Squeeze of {run.name}:")
        config = _with_squeeze(run, self._plan.config)
        adapter = stored_checkpoints(RunFolder(run.folder)) / FINAL
        try:
            squeezed = squeeze_adapter(config, adapter, progress=self._say)
            track_squeeze(config, RunFolder(self._plan.folder / SQUEEZE_RUN), squeezed.analysis, self._say)
        except Untrained as error:
            self._untrained.add(run.name)
            self._due = True
            self._say(f"LoRA-Squeeze takes the next run: {error}")
            return
        except RetrainError as error:
            self._say(f"LoRA-Squeeze failed, and the campaign goes on: {error}")
            return
        for line in squeezed.lines():
            self._say(line)
        self._manifest.squeeze = squeezed.to_json()
        self._manifest.write_if_possible()


def _with_squeeze(run: CampaignRun, campaign: TrainConfig) -> TrainConfig:
    given = campaign.squeeze.model_dump(exclude_unset=True, exclude={"adapter_path"})
    return replaced(run.config, {f"squeeze.{name}": value for name, value in given.items()})


def comparison_lines(plan: Plan) -> list[str]:
    """Every condition against the first, as `retrain compare` prints it; a sentence where there is nothing to compare."""
    if len(plan.conditions) < 2:
        return []
    from retrain.analysis.compare import compare_campaign
    from retrain.analysis.comparison_terminal import to_text
    from retrain.analysis.verdict import Rules

    try:
        return ["", *to_text(compare_campaign(plan.folder, Rules()), shutil.get_terminal_size().columns).splitlines()]
    except (ConfigurationError, EnvironmentFailure) as error:
        return [f"No comparison: {error}"]
