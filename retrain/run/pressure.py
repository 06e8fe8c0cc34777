"""Back pressure within a run: measures each step for the controller, takes its batch size for the
next, and replays both after a resume.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING, Any

from retrain.backpressure import BackpressureController, Roofline, roofline, step_flops
from retrain.records.jsonl import aside_of, read_jsonl
from retrain.records.run_folder import RunFolder

if TYPE_CHECKING:
    from retrain.backends.base import Backend
    from retrain.config import TrainConfig
    from retrain.run.step_record import Step

_PASSES_OF_LORA = 4.0
"""FLOP per parameter and trained token: forward 2, gradients of the inputs 2. The frozen weights
get no gradient.
"""
_RECOMPUTED = 2.0
"""The forward pass once more under gradient checkpointing."""


@dataclass
class Pressure:
    """Chooses the batch size of the next step; it exists only if `[backpressure] enabled` is
    true.
    """

    config: "TrainConfig"
    backend: "Backend"
    replayed: Mapping[int, float]
    """Step -> the seconds behind the decision when an earlier session made that step."""

    def __post_init__(self) -> None:
        settings, training = self.config.backpressure, self.config.training
        self.controller = BackpressureController(settings, training.batch_size, training.group_size)

    def observe(self, step: "Step", seconds: float) -> dict[str, Any]:
        """Decide the next batch size; returns the bp_ fields of the step's record.

        `seconds` is the step's time on rank 0. If an earlier session made the step, its time then
        decides, so a resumed run visits the same batch sizes.
        """
        seconds = self.replayed.get(step.number, seconds)
        decision = self.controller.observe(step.rollout.tokens, seconds)
        return decision.record_fields(self._hint(step, seconds)) | {"bp_step_time_s": seconds}

    def _hint(self, step: "Step", seconds: float) -> Roofline | None:
        weights, settings = self.backend.frozen_weights, self.config.backpressure
        if weights is None or not (settings.peak_gflops and settings.peak_bw_gb_s):
            return None
        trained = sum(len(row.token_ids) for row in step.rows if row.trained)
        per_token = _PASSES_OF_LORA + _RECOMPUTED * self.backend.recomputes
        flops = step_flops(weights.parameters, step.rollout.tokens, trained, per_token)
        size = weights.size * self._passes(step, trained)
        return roofline(flops, size, seconds, settings.peak_gflops, settings.peak_bw_gb_s)

    def _passes(self, step: "Step", trained: int) -> int:
        """Count the passes over all weights: one per decoding step of the rows that run together,
        and a pass forward and back per micro-batch.

        It leaves out KV traffic, so memory-bound steps are rather more so.
        """
        trajectories = list(chain.from_iterable(group.trajectories for group in step.rollout.drawn))
        completions = chain.from_iterable(trajectory.completions for trajectory in trajectories)
        lengths = [len(completion.token_ids) for completion in completions]
        choices, rows, micro_batch = self.backend.choices, len(lengths), trained
        if choices:
            rows, micro_batch = choices.decode_rows, choices.micro_batch_tokens
        decoding = max(*lengths, ceil(sum(lengths) / max(rows, 1)))
        return decoding + (2 + self.backend.recomputes) * ceil(trained / max(micro_batch, 1))


def decided_by(folder: RunFolder, first_step: int) -> dict[int, float]:
    """Return step -> seconds of the steps from `first_step` on that a resumed run makes again. This
    includes steps whose rows an earlier resume cut before it ended. It ignores anything but such a
    pair.
    """
    logs = map(read_jsonl, (aside_of(folder.metrics), folder.metrics))
    pairs = [(row["step"], row.get("bp_step_time_s")) for row in chain.from_iterable(logs)]
    return {
        step: float(seconds)
        for step, seconds in pairs
        if step >= first_step and isinstance(seconds, int | float) and seconds > 0
    }
