"""The state of a run between two steps, as a value: each step and each evaluation gives another."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from retrain.errors import RunFailed
from retrain.system import Json, parse_json
from retrain.types import MachineChoices

SCHEMA_VERSION = 1
Stage = Literal["sft", "rl"]


@dataclass(frozen=True)
class TrainerState:
    """The state of a run between two steps, apart from the backend's own. All else follows from it
    and the configuration. It is a value: a change of the run returns another state.
    """

    seed: int
    config_hash: str
    step: int = 0
    """Steps completed."""
    stage: Stage = "rl"
    """The stage that the next step belongs to."""
    sft_step: int = 0
    """Steps of the supervised stage completed."""
    learning: bool = False
    """True from the first change of the weights until the step has a record. A checkpoint never has
    such a state.
    """
    cursor: int = 0
    """Consumed prompts; the data order itself follows from (seed, epoch)."""
    batch_size: int = 0
    correct: int = 0
    judged: int = 0
    """Judged completions so far; with `correct` they give the running correct rate."""
    tokens: int = 0
    seconds: float = 0.0
    last_evaluation: int = -1
    """The step count of the newest evaluation; -1 before the first."""
    gate_mismatch: float | None = None
    """Mean |engine - learner| log-prob, in nats, of the parity gate at the run's first start; the
    default max_logprob_diff follows from it."""
    sampler: Json = field(default_factory=dict)
    """The state of `[data] sampler`; empty for the shuffle."""
    credit: Json = field(default_factory=dict)
    """The state of a plugin of `[algorithm] advantage_mode`; empty for a built-in one."""
    sepa: Json = field(default_factory=dict)
    rewards: Json = field(default_factory=dict)
    backpressure: Json = field(default_factory=dict)
    """The controller's state; empty unless `[backpressure] enabled` is true."""
    tracking: Json = field(default_factory=dict)
    files: dict[str, Json] = field(default_factory=dict)
    """Path in the run folder -> size and sha256, for each JSON lines file of the run."""
    choices: MachineChoices | None = None
    schema_version: int = SCHEMA_VERSION

    def after_step(
        self,
        *,
        prompts: int,
        next_batch_size: int,
        correct: int,
        judged: int,
        tokens: int,
        seconds: float,
    ) -> Self:
        """Return the state after a step that took `prompts` prompts and `seconds`."""
        return replace(
            self,
            step=self.step + 1,
            learning=False,
            cursor=self.cursor + prompts,
            batch_size=next_batch_size,
            correct=self.correct + correct,
            judged=self.judged + judged,
            tokens=self.tokens + tokens,
            seconds=self.seconds + seconds,
        )

    @property
    def place(self) -> tuple[Stage, int]:
        """The stage, and the number of its completed steps."""
        return self.stage, self.sft_step if self.stage == "sft" else self.step

    def after_sft_step(self, *, tokens: int, seconds: float, ends: bool) -> Self:
        """Return the state after a step of the supervised stage. `ends` means that it was the last
        step, after which the new weights have no evaluation in their stage.
        """
        return replace(
            self,
            stage="rl" if ends else "sft",
            sft_step=self.sft_step + 1,
            learning=False,
            last_evaluation=-1 if ends else self.last_evaluation,
            tokens=self.tokens + tokens,
            seconds=self.seconds + seconds,
        )

    def after_evaluation(self, seconds: float) -> Self:
        """Return the state after an evaluation of the current weights that took `seconds`."""
        return replace(self, last_evaluation=self.place[1], seconds=self.seconds + seconds)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: Path) -> Self:
        values = parse_json(text)
        if values.get("schema_version") != SCHEMA_VERSION:
            raise RunFailed(
                f"{where} was written with state version {values.get('schema_version')!r}, this"
                f" retrain reads version {SCHEMA_VERSION}: resume with the version that wrote it."
            )
        if values.get("choices") is not None:
            values["choices"] = MachineChoices(**_known(MachineChoices, values["choices"]))
        return cls(**_known(cls, values))


def _known(kind: type[Any], values: Mapping[str, Any]) -> Json:
    """Leave out fields that another version has stored and this version does not know."""
    names = {item.name for item in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
