"""The training loop: one step is sample, score, assign credit, learn, observe.

Everything that does not fit on this page is in the nouns that it calls: `session` holds what a run is made of, `rollout` draws
scored groups, `advantages` turns rewards into token credit, `backends` learn, `checkpoint` and `tracking` write it down.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config import TrainConfig
from retrain.errors import Interrupted
from retrain.session import Session


@dataclass(frozen=True)
class Run:
    """A finished run, as `retrain.train` returns it."""

    folder: Path
    summary: dict[str, Any]
    """What summary.json holds."""

    @property
    def adapter(self) -> Path:
        """The PEFT folder of the last adapter."""
        return Path(self.summary["adapter"])


def train(config: TrainConfig, *, overwrite: bool = False, quiet: bool = False) -> Run:
    """Run `config` to its last step, or resume it from `[resume] from`.

    `overwrite` empties a run folder that carries our marker; `quiet` silences standard output.
    Raises ConfigurationError, EnvironmentFailure, RunFailed or Interrupted; what was trained until then is saved.
    """
    with Session.open(config, overwrite=overwrite, quiet=quiet) as session:
        try:
            session.start()
            while True:
                session.evaluate_if_due()
                session.save_if_due()
                if session.finished:
                    return Run(session.folder.path, session.finish())
                step(session)
        except Interrupted:
            session.save_now()
            raise


def step(session: Session) -> None:
    """One optimizer step's worth of prompts. Nothing has changed if it is interrupted before the learning."""
    clock = session.clock
    clock.start()
    prompts = session.next_prompts()
    rollout = session.sampler.draw(prompts, session.state.step, session.plan, session.watch("sampling"))
    clock.mark("credit")
    sepa_lambda = session.sepa.resolve(session.state.step)
    credit = session.credit.assign([group.judged() for group in rollout.groups], session.state.step, sepa_lambda)
    rows = credit.rows()
    session.interrupts.check()
    clock.mark("learn")
    result = session.backend.train(rows, session.state.step)
    clock.stop()
    session.observe(rollout, credit, rows, result, sepa_lambda)
