"""What is due between two steps, and the saving of checkpoints."""

from dataclasses import dataclass

from retrain.config import schema
from retrain.errors import EnvironmentFailure
from retrain.records.checkpoint import TrainerState
from retrain.records.disk import replace_file
from retrain.records.terminal import counted
from retrain.run.opening import OpenedRun
from retrain.run.parts import Parts
from retrain.run.pressure import Pressure
from retrain.tracking import Tracker

_ATTEMPTS = 3
_BYTES_PER_PARAMETER = 12  # fp32 weight and two AdamW moments


@dataclass(frozen=True)
class Schedule:
    """The evaluations and checkpoints that are due in a run, and its end. `step` counts completed
    steps.
    """

    training: schema.Training
    evaluation: schema.Evaluation

    def is_finished(self, state: TrainerState) -> bool:
        return state.step >= self.training.max_steps or self.is_out_of_time(state)

    def is_out_of_time(self, state: TrainerState) -> bool:
        """Return True if the run has used up `[training] max_hours`; 0 sets no limit."""
        return 0 < self.training.max_hours * 3600 <= state.seconds

    def evaluates_at(self, step: int) -> bool:
        evaluation = self.evaluation
        return (
            (evaluation.at_start and step == 0)
            or (evaluation.every > 0 and step > 0 and step % evaluation.every == 0)
            or (evaluation.at_end and step == self.training.max_steps)
        )

    def saves_at(self, step: int, state: TrainerState) -> bool:
        every = self.training.save_every
        due = every > 0 and step % every == 0
        return step > 0 and (due or step >= self.training.max_steps or self.is_out_of_time(state))


class Saver:
    """Seals the state of rank 0 between two steps."""

    def __init__(
        self, opened: OpenedRun, parts: Parts, tracker: Tracker, pressure: Pressure | None
    ) -> None:
        self.folder = opened.folder
        self.store = opened.store
        self.state = opened.state
        self.parts = parts
        self.pressure = pressure
        self.tracker = tracker
        self._saved_at = opened.checkpoint.step if opened.checkpoint else -1
        self._failures = 0
        """Attempts in a row that failed."""

    @property
    def is_current(self) -> bool:
        """True if the newest checkpoint holds the current state."""
        return self._saved_at == self.state.step

    def what_is_saved(self) -> str:
        """Say what a resume would find, without a full stop."""
        step, learning = self.state.step, self.state.learning
        if self.is_current and not learning:
            return f"The run is saved after {counted(step, 'step')}"
        lost = (
            f"Step {step} was under way and"
            if learning
            else f"The state after {counted(step, 'step')}"
        )
        if self._saved_at < 0:
            return (
                f"{lost} is not saved, and there is no checkpoint yet, so a resume begins at step 0"
            )
        return (
            f"{lost} is not saved; the newest checkpoint is that after"
            f" {counted(self._saved_at, 'step')}"
        )

    @property
    def is_behind(self) -> bool:
        """True if the disk refused a checkpoint or a line that is still to be written."""
        return self._failures > 0 or self.tracker.is_behind

    def rehearse(self) -> None:
        """Raise EnvironmentFailure if no checkpoint would fit on the disk."""
        self.store.rehearse(_BYTES_PER_PARAMETER * self.parts.backend.num_trainable)

    def save(self, *, may_retry: bool) -> None:
        """Write a checkpoint of the current state. A failure leaves the one before in place;
        EnvironmentFailure is raised at the third failure in a row, or if it may not be retried.
        """
        self.state.sepa = self.parts.sepa.state_dict()
        self.state.rewards = self.parts.guard.state_dict()
        self.state.backpressure = self.pressure.state_dict() if self.pressure else {}
        self.state.tracking = self.tracker.state()
        try:
            self.state.files = (
                self.tracker.sync()
            )  # a checkpoint is never ahead of the rows of its steps
            self.store.save(self.state, self.parts.backend.save)
            replace_file(self.folder.trainer_state, self.state.to_json())
        except OSError as error:
            self._failures += 1
            where = error.filename or self.store.folder
            sentence = (
                f"The checkpoint of step {self.state.step} could not be written to {where}:"
                f" {error.strerror or error}"
            )
            if self._failures >= _ATTEMPTS or not may_retry:
                raise EnvironmentFailure(
                    f"{sentence}, {counted(self._failures, 'time')} in a row; free space there,"
                    f" then continue with `{self.folder.resume_command}`."
                ) from error
            self.tracker.message(f"{sentence}; trying again after the next step.")
            return
        self._saved_at = self.state.step
        self._failures = 0

    def save_final(self) -> None:
        """Write the last adapter, without the state that a resume needs."""
        self.store.save_final(self.state, self.parts.backend.save_adapter)
