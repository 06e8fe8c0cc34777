"""The evaluations and checkpoints that are due between two steps, and the saving of checkpoints."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from retrain.backends.base import Backend
from retrain.config import TrainConfig
from retrain.errors import EnvironmentFailure, RunFailed
from retrain.records.checkpoint import CheckpointStore
from retrain.records.disk import replace_file, was_deleted
from retrain.records.run_folder import RunFolder
from retrain.records.state import TrainerState
from retrain.records.terminal import counted
from retrain.tracking import Tracker
from retrain.tracking.base import is_due

_ATTEMPTS = 3
_BYTES_PER_PARAMETER = 12  # fp32 weight and two AdamW moments


@dataclass(frozen=True)
class Schedule:
    """The evaluations and checkpoints that are due in a run, and its end. `step` counts completed
    steps.
    """

    config: TrainConfig
    evaluated: Collection[int] = ()
    """Steps at which an earlier session of the run evaluated, under whatever schedule."""
    saved: Collection[int] = ()
    """Steps of the checkpoints of earlier sessions, and those from which one resumed. In split mode
    the run samples no step ahead of them.
    """

    def is_finished(self, state: TrainerState) -> bool:
        return (
            state.stage == "rl" and state.step >= self.config.training.max_steps
        ) or self.is_out_of_time(state)

    def is_out_of_time(self, state: TrainerState) -> bool:
        """Return True if the run has used up `[training] max_hours`; 0 sets no limit."""
        return 0 < self.config.training.max_hours * 3600 <= state.seconds

    def evaluates_at(self, step: int) -> bool:
        evaluation = self.config.evaluation
        return (
            step in self.evaluated
            or (evaluation.at_start and step == 0)
            or (step > 0 and is_due(evaluation.every, step))
            or (evaluation.at_end and step == self.config.training.max_steps)
        )

    def evaluates(self, state: TrainerState) -> bool:
        """Return True if an evaluation of the weights of `state` is due. The weights at the end of
        the supervised stage are the first weights of reinforcement.
        """
        stage, step = state.place
        if stage == "rl":
            return self.evaluates_at(step)
        return (step == 0 and self.config.evaluation.at_start) or is_due(
            self.config.sft.evaluate_every, step
        )

    def saves(self, state: TrainerState) -> bool:
        """Return True if a checkpoint of `state` is due, which includes the end of the supervised
        stage.
        """
        stage, step = state.place
        if stage == "rl":
            return self.saves_at(step, state) or (step == 0 < state.sft_step)
        return step > 0 and self._is_due(step, state)

    def saves_at(self, step: int, state: TrainerState) -> bool:
        return step > 0 and (
            step in self.saved
            or step >= self.config.training.max_steps
            or self._is_due(step, state)
        )

    def _is_due(self, step: int, state: TrainerState) -> bool:
        return is_due(self.config.training.save_every, step) or self.is_out_of_time(state)


def steps_at(place: tuple[str, int]) -> str:
    """Say how many steps the run has completed: `3 supervised steps`."""
    stage, step = place
    return counted(step, "supervised step" if stage == "sft" else "step")


@dataclass
class Saver:
    """Seals the state of rank 0 between two steps."""

    folder: RunFolder
    store: CheckpointStore
    backend: Backend
    tracker: Tracker
    saved: TrainerState | None
    """The state of the newest checkpoint; None before the first."""
    failures: int = 0
    """Attempts in a row that failed."""

    def holds(self, state: TrainerState) -> bool:
        """Return True if the newest checkpoint is of `state`, with the evaluation at its step."""
        saved = self.saved
        return saved is not None and (saved.place, saved.last_evaluation) == (
            state.place,
            state.last_evaluation,
        )

    def what_is_saved(self, state: TrainerState) -> str:
        """Say what a resume would find, without a full stop."""
        now = steps_at(state.place)
        if self.saved and self.saved.place == state.place and not state.learning:
            return f"The run is saved after {now}"
        lost = f"The state after {now}"
        if state.learning:
            stage, step = state.place
            lost = f"{'Supervised step' if stage == 'sft' else 'Step'} {step} was under way and"
        if self.saved is None:
            return (
                f"{lost} is not on disk; the run has no checkpoint yet, so a resume begins at"
                " step 0"
            )
        return f"{lost} is not on disk; the newest checkpoint is after {steps_at(self.saved.place)}"

    @property
    def is_behind(self) -> bool:
        """True if the disk refused a checkpoint or a line that is still to write."""
        return self.failures > 0 or self.tracker.is_behind

    def rehearse(self) -> None:
        """Raise EnvironmentFailure if no checkpoint would fit on the disk."""
        self.store.rehearse(_BYTES_PER_PARAMETER * self.backend.num_trainable)

    def save(self, state: TrainerState, *, may_retry: bool) -> None:
        """Write a checkpoint of `state`, with the extent of the run's files. A failure leaves the
        previous checkpoint in place. Raises EnvironmentFailure at the third failure in a row, or at
        the first without `may_retry`. Raises RunFailed if the run's folder is gone.
        """
        try:
            # A checkpoint is never ahead of the rows of its steps, so flush these rows first.
            stored = replace(state, files=self.tracker.sync())
            self.store.save(stored, self.backend.save)
            replace_file(self.folder.trainer_state, stored.to_json())
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self.folder.marker.is_file():
                raise RunFailed(was_deleted(self.folder.path)) from error
            self.failures += 1
            where = error.filename or self.store.folder
            sentence = (
                f"retrain cannot write the checkpoint of step {state.step} to {where}:"
                f" {error.strerror or error}"
            )
            if self.failures >= _ATTEMPTS or not may_retry:
                raise EnvironmentFailure(
                    f"{sentence}, {counted(self.failures, 'time')} in a row; free space there,"
                    f" then continue with `{self.folder.resume_command}`."
                ) from error
            self.tracker.message(f"{sentence}; trying again after the next step.")
            return
        self.saved = state
        self.failures = 0
