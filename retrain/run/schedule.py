"""The work that is due between two steps, as pure functions of the configuration and the step count or state."""

from dataclasses import dataclass

from retrain.config import schema
from retrain.records.checkpoint import TrainerState


@dataclass(frozen=True)
class Schedule:
    """The evaluations and checkpoints that are due in a run, and its end. `step` counts completed steps."""

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
        return step > 0 and (step % self.training.save_every == 0 or step >= self.training.max_steps or self.is_out_of_time(state))
