"""What a run is made of between two steps: its folder, its parts, its state, and what is due."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrain.advantages.pipeline import Credit
from retrain.checkpoint import replace_file
from retrain.config import TrainConfig
from retrain.errors import EnvironmentFailure, RunFailed
from retrain.evaluation import Evaluation
from retrain.interrupts import Interrupts
from retrain.metrics import StepClock, generation_records, step_record, token_table
from retrain.opening import Opening, open_run
from retrain.preflight import preflight_lines, refuse_not_built
from retrain.rollout import Rollout, Watcher
from retrain.sepa import SEPAController
from retrain.startup import Parts, load_parts, run_parity_gate, training_plan
from retrain.tracking import RunSummary, StepRecord, Tracker, build_tracker, read_jsonl
from retrain.tracking.record import EvaluationRecord
from retrain.types import Outcome, Prompt, Row, StepResult

_NONFINITE_LIMIT = 3
_SAVE_ATTEMPTS = 3
_CHECKPOINT_BYTES_PER_PARAMETER = 12  # fp32 weight and two AdamW moments


class Session:
    """One process's share of a run: between steps, `state` and the backend are all that changes."""

    def __init__(self, opening: Opening, tracker: Tracker, interrupts: Interrupts, parts: Parts) -> None:
        self.config = opening.config
        self.folder = opening.folder
        self.store = opening.store
        self.state = opening.state
        self.tracker = tracker
        self.interrupts = interrupts
        self.parts = parts
        self.sepa = SEPAController(self.config.sepa)
        self.plan = training_plan(self.config)
        self.clock = StepClock()
        self._record: StepRecord | None = None
        self._evaluations: list[Evaluation] = []
        self._saved_at = -1
        self._failed_saves = 0

    @classmethod
    @contextmanager
    def open(cls, config: TrainConfig, *, overwrite: bool, quiet: bool) -> Iterator["Session"]:
        """Everything loaded, restored and checked, so that the next thing to do is a step. Closes what it opened."""
        refuse_not_built(config)
        with open_run(config, overwrite=overwrite) as opening, Interrupts() as interrupts:
            tracker = build_tracker(
                opening.config, opening.folder, condition=config.condition_label, quiet=quiet, resumed=opening.state.tracking
            )
            try:
                for line in (*preflight_lines(opening.config), *opening.notes):
                    tracker.message(line)
                parts = load_parts(opening.config, opening.state.choices, tracker.message)
                try:
                    session = cls(opening, tracker, interrupts, parts)
                    session._restore(opening)
                    session._pass_gate()
                    yield session
                finally:
                    parts.close()
            finally:
                tracker.close()

    def _restore(self, opening: Opening) -> None:
        """Put the checkpoint's state into the parts, and make the folder ready for the first line."""
        backend = self.parts.backend
        if opening.checkpoint:
            backend.load(opening.checkpoint.folder)
            self.sepa.load_state_dict(self.state.sepa)
            self.parts.scorer.load_state_dict(self.state.rewards)
            self._saved_at = opening.checkpoint.step
            self._evaluations = self._stored_evaluations()
        if self.state.choices not in (None, backend.choices):
            self.tracker.message("The machine's choices differ from the stored ones: from here on this run is not byte-exact.")
        self.state.choices = backend.choices
        self.tracker.start(self.parts.backend.device)

    def _pass_gate(self) -> None:
        result = run_parity_gate(self.config, self.parts)
        self.tracker.message(result.line())
        environment = json.loads(self.folder.environment.read_text(encoding="utf-8"))
        replace_file(self.folder.environment, json.dumps(environment | {"parity_gate": result.to_json()}, indent=2) + "\n")
        self.store.rehearse(_CHECKPOINT_BYTES_PER_PARAMETER * self.parts.backend.num_trainable)

    # -- one step ------------------------------------------------------------------------------------------------------

    def next_prompts(self) -> list[Prompt]:
        return self.parts.prompts.batch(self.state.cursor, self.state.batch_size, self.state.seed)

    def watch(self, label: str, total: int) -> Watcher:
        """Shows progress and stops between two completions when asked to."""
        done = 0

        def count(_: object) -> None:
            nonlocal done
            done += 1
            self.tracker.progress(label, done, total)

        return Watcher(check=self.interrupts.check, completion=count)

    def observe(self, rollout: Rollout, credit: Credit, rows: Sequence[Row], result: StepResult, sepa_lambda: float) -> None:
        """Write the step down and move the state past it."""
        step = self.state.step
