"""The training loop: one step is sample, score, assign credit, learn, observe.

Everything that does not fit on this page is in the nouns that it calls: `session` holds what a run is made of, `rollout` draws
scored groups, `advantages` turns rewards into token credit, `backends` learn, `checkpoint` and `tracking` write it down.
"""

from dataclasses import dataclass
from pathlib import Path

from retrain.config import TrainConfig
from retrain.errors import Interrupted, RunFailed
from retrain.records.disk import writing_to
from retrain.records.entries import StepRecord
from retrain.records.jsonl import read_jsonl
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary
from retrain.run.session import Session, usable_groups


@dataclass(frozen=True)
class Run:
    """A finished run, as `retrain.train` returns it."""

    folder: Path
    summary: RunSummary

    @property
    def adapter(self) -> Path:
        """The PEFT folder of the last adapter."""
        return self.folder / self.summary.adapter

    def metrics(self) -> list[StepRecord]:
        """One record a step, oldest first."""
        return [StepRecord.from_json(line) for line in read_jsonl(RunFolder(self.folder).metrics)]


def train(config: TrainConfig, *, overwrite: bool = False, quiet: bool = False) -> Run:
    """Run `config` to its last step, or go on with the run that `[resume] from` names.

    `overwrite` empties a run folder that carries our marker; `quiet` silences standard output.
    Raises ConfigurationError, EnvironmentFailure, RunFailed or Interrupted; the steps that were done until then are saved. A second
    signal raises StoppedAtOnce, which saves nothing.
    """
    folder = Path(config.resume.from_ or config.logging.log_dir)
    with writing_to(folder, f"go on with --resume {folder}"), Session.open(config, overwrite=overwrite, quiet=quiet) as session:
        try:
            while True:
                session.evaluate_if_due()
                session.save_if_due()
                if session.finished:
                    return Run(session.folder.path, session.finish())
                take_step(session)
        except (Interrupted, RunFailed):
            session.save_now()
            raise


def take_step(session: Session) -> None:
    """One batch of prompts, one step of learning. Interrupted before the learning, it has changed nothing."""
    step, parts, clock = session.state.step, session.parts, session.clock
    clock.start()
    rollout = session.sample()
    clock.mark("credit")
    sepa_lambda = session.sepa.resolve(step)
    credit = parts.credit.assign(usable_groups(rollout), step, sepa_lambda)
    rows = credit.rows()
    session.stop_if_asked()
    session.sample_ahead(len(rollout.groups))
    clock.mark("learn")
    log_ratios = session.log_ratios(rows)
    session.state.learning = True  # until `observe` has written the step down
    result = parts.backend.train(rows, step)
    clock.stop()
    session.observe(rollout, credit, rows, result, sepa_lambda, log_ratios)
