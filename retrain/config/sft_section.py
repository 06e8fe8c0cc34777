"""The section about the supervised stage before reinforcement learning."""

from typing import Annotated, Any, Literal

from retrain.config.names import bracketed
from retrain.config.section import Section, Traits, Violation, Violations, key
from retrain.config.values import OpenName
from retrain.system import toml_value


class Sft(Section):
    """Supervised fine-tuning before the first step of reinforcement learning."""

    traits = Traits(needs="supervision")

    source: Annotated[str, OpenName("data", may_be_empty=True)] = key(
        "",
        "Traces to learn from, as [data] source; empty means [data] source, whose solutions are"
        " the traces. A row has prompt and completion, or messages.",
    )
    completion_column: str = key(
        "",
        "Column that holds the completion; empty means completion, and of math and gsm8k the"
        " solution.",
    )
    steps: int = key(0, "Steps of the stage; 0 is off.", ge=0)
    epochs: float = key(0.0, "Passes over the traces instead of steps; 0 is off.", ge=0)
    batch_size: int = key(16, "Traces per step.", ge=1, sizes_memory=True)
    lr: float | None = key(
        None,
        "Learning rate of the stage; unset means [training] lr. The optimizer starts over"
        " after the stage.",
        ge=0,
        meaningful_unset=True,
        echoes_training=True,
        example=2e-4,
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "Learning rate after warm-up: constant, or falling to 0 at the stage's end."
    )
    lr_warmup_steps: int = key(
        0, "Steps of the stage over which the learning rate rises from 0.", ge=0
    )
    max_tokens: int = key(
        0,
        "Maximum number of tokens of prompt and completion; retrain leaves out longer traces."
        " 0 is the model's context.",
        ge=0,
        sizes_memory=True,
    )
    evaluate_every: int = key(
        0,
        "Steps of the stage between evaluations, which measure the mean log-prob of held-out traces"
        " and the problems that [evaluation] asks for; 0 is off.",
        ge=0,
        may_change_at_resume=True,
    )

    @property
    def is_on(self) -> bool:
        """True if the run has a supervised stage."""
        return self.steps > 0 or self.epochs > 0

    def problems(self, config: Any) -> Violations:
        if self.steps and self.epochs:
            yield Violation(
                ("sft.steps", "sft.epochs"),
                f"[sft] steps = {self.steps} and epochs = {self.epochs:g} both say how long the"
                " stage is; keep one",
            )
        asked = self.model_fields_set - {"steps", "epochs"}
        if asked and not self.model_fields_set & {"steps", "epochs"}:
            name = min(asked, key=list(type(self).model_fields).index)
            yield Violation(
                ("sft.steps", f"sft.{name}"),
                f"[sft] {name} = {toml_value(getattr(self, name))} needs the length of the"
                " stage; set steps or epochs, or steps = 0 for no stage",
            )
        beside = "environment.provider" if config.environment.provider else "data.mix"
        if self.is_on and not self.source and config.value(beside):
            yield Violation(
                ("sft.source", beside),
                f"[sft] source is empty, and {bracketed(beside)} gives problems without traces;"
                " name a file of traces, or a source such as math",
            )
        if not config.training.max_steps and not self.is_on:
            yield Violation(
                ("training.max_steps", "sft.steps"),
                "[training] max_steps = 0 needs a supervised stage, and [sft] has no steps or"
                " epochs; give max_steps of at least 1, or [sft] steps",
            )
