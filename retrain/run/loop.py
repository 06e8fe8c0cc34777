"""The training loop: one step is sample, score, assign credit, learn, record.

Everything that does not fit on this page is in the nouns that it calls. `session` opens the run,
samples, learns and holds the run's state, and `advantages` turns rewards into token credit.
`observer` writes the step down, and `saver` says what is due and writes checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.backends.base import backend_kind
from retrain.config import TrainConfig
from retrain.errors import (
    EnvironmentFailure,
    Interrupted,
    ResumableFailure,
    RunFailed,
    ServerFailure,
)
from retrain.records.disk import writing_to
from retrain.records.entries import StepRecord
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary
from retrain.run.notebook import with_functions
from retrain.run.session import Session
from retrain.run.step_record import Step, StepClock
from retrain.tracking.base import Verbosity

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """A finished run, as `retrain.train` returns it."""

    folder: Path
    summary: RunSummary

    @property
    def adapter(self) -> Path:
        """The PEFT folder of the last adapter."""
        return self.folder / self.summary.adapter

    def records(self) -> list[StepRecord]:
        """Return one record per step, oldest first."""
        return list(StepRecord.read(RunFolder(self.folder).metrics))

    def metrics(self) -> "pd.DataFrame":
        """Return a row per step with the fields of a StepRecord as columns. A missing value is
        never 0. Raises EnvironmentFailure without pandas.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise EnvironmentFailure(
                "Run.metrics() needs pandas, which this environment lacks; `pip install"
                " pandas`, or take Run.records()."
            ) from error
        return pd.DataFrame([record.to_json() for record in self.records()]).convert_dtypes()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}: {self.summary!r})"


def train(
    config: TrainConfig,
    *,
    overwrite: bool = False,
    quiet: bool = False,
    verbosity: Verbosity = Verbosity.NORMAL,
    skip_parity: bool = False,
    reward: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    said: Sequence[str] = (),
) -> Run:
    """Run `config` to its last step, or resume the run that `[resume] from` names.

    `reward` and `advantage` are functions, for example from a notebook, instead of the plugins that
    `config` names. The run's folder keeps their source.

    `overwrite` empties a run folder of retrain. `quiet` prints only the start, the evaluations and
    the end, like `Verbosity.QUIET`. `skip_parity` skips the parity gate. The output begins with the
    lines `said`. Raises ConfigurationError, EnvironmentFailure, RunFailed or Interrupted, with the
    steps completed so far saved. A second signal raises StoppedAtOnce, which saves nothing.
    """
    functions = {"reward.type": reward, "algorithm.advantage_mode": advantage}
    given = {key: function for key, function in functions.items() if function}
    folder = RunFolder(config.folder)
    again = f"continue with `{folder.resume_command}`"
    with (
        writing_to(folder.path, lambda: again if folder.config.is_file() else "start it again"),
        with_functions(config, given) as config,
        Session.open(
            config,
            overwrite=overwrite,
            verbosity=Verbosity.QUIET if quiet else verbosity,
            skip_parity=skip_parity,
            said=said,
        ) as session,
    ):
        try:
            while True:
                session.evaluate_if_due()
                session.save_if_due()
                if session.is_finished:
                    return Run(session.folder.path, session.finish())
                next_step(session)
        except ResumableFailure as error:
            session.save_now()
            raise RunFailed(f"{str(error).rstrip('.')}, then {again}.") from error
        except (Interrupted, RunFailed):
            session.save_now()
            raise
        except ServerFailure as error:
            saved = session.save_now()
            flag = backend_kind(config.backend.backend).address_flag
            how = f"{again}, at another address with {flag}"
            raise ServerFailure(f"{error} {saved}: {how}.") from error


def next_step(session: Session) -> None:
    """Take a step of the run's stage."""
    if session.state.stage == "sft":
        session.take_supervised_step()
    else:
        take_step(session)


def take_step(session: Session) -> None:
    """Take one step: sample and score a batch, assign credit, learn, and record it. A step that
    stops before the learning has changed nothing.
    """
    parts, number, clock = session.parts, session.state.step, StepClock("sample")
    rollout = session.sample()
    clock.mark("credit")
    sepa_lambda = parts.sepa.resolve(number)
    teacher = session.taught if parts.teacher else None
    credit = parts.credit.assign(rollout.usable_groups, number, sepa_lambda, teacher)
    rows = credit.rows()
    session.turn_to_learning(used=len(rollout.groups))
    clock.mark("learn")
    log_ratios, result = session.learn(rows, rollout)
    clock.stop()
    step = Step(number, rollout, sepa_lambda, credit, rows, log_ratios, result, clock)
    session.record(step)
