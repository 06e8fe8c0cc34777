"""Sections about credit assignment: the algorithm and its parameters, what moves with the step.

A key's documentation says what it does. Its type and range say which values are valid, so the
sentence does not.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, model_validator

from retrain.config.names import ALIASES, transforms_with
from retrain.config.recipes import modes_of
from retrain.config.section import (
    PathText,
    Section,
    Strings,
    Table,
    Violation,
    Violations,
    key,
)
from retrain.config.values import OpenName, check_grams, parse_grams, with_former_names
from retrain.system import Json


class Algorithm(Section):
    """The algorithm that turns rewards into token advantages."""

    algorithm_mode: Annotated[str, OpenName("algorithm", may_be_empty=True)] = key(
        "",
        "A whole algorithm, built in or a plugin; when set it replaces advantage_mode and"
        " transform_mode.",
        not_for_a_condition="write algorithm_mode",
    )
    advantage_mode: Annotated[str, OpenName("advantage")] = key(
        "maxrl",
        "Advantage of a completion within its group, built in or a plugin.",
        not_for_a_condition="write advantage_mode",
    )
    transform_mode: Annotated[str, OpenName("transform")] = key(
        "gtpo_sepa",
        "How a completion's advantage is spread over its tokens, built in or a plugin.",
        not_for_a_condition="write transform_mode",
    )
    uncertainty_kind: Annotated[str, OpenName("uncertainty")] = key(
        "surprisal",
        "Per-token uncertainty that GTPO weights by; shannon_entropy needs engine pytorch and"
        " backend local.",
    )
    surprisal_mask_rho: float = key(
        0.0,
        "Train only on this fraction of tokens, those with the highest uncertainty (arXiv"
        " 2506.01939); 0 is off.",
        ge=0,
        le=1,
        movable=True,
        needs="token_advantages",
    )
    surprisal_mask_scope: Literal["batch", "group", "completion"] = key(
        "batch",
        "Tokens that set the mask's threshold.",
        applies_when="surprisal_mask_rho not in (0)",
    )
    surprisal_mask_denominator: Literal["all", "kept"] = key(
        "all",
        "Tokens in the means of [loss] aggregation: all, with the masked as zeros, or those"
        " kept in each update.",
        applies_when="surprisal_mask_rho not in (0)",
    )
    teacher: Annotated[PathText, with_former_names("algorithm.teacher")] = key(
        "",
        'Teacher that scores the sampled tokens; empty is none. "base": the frozen model.'
        ' "start": the weights before the first RL step. "answer": the policy with the answer in'
        " its prompt. Else the folder of an adapter of this model.",
        needs="teacher",
    )
    teacher_prompt: str = key(
        "{prompt}\n\nThe correct answer is {answer}.",
        'The last user message of the teacher with teacher = "answer"; {prompt} is the'
        " policy's prompt, {answer} the reference answer.",
        applies_when="teacher in (answer)",
    )
    teacher_coef: float = key(
        1.0, "Weight of the teacher's log-ratio in transform_mode distill.", ge=0, movable=True
    )
    params: Table = key({}, "Parameters of an algorithm_mode plugin.")
    advantage_params: Table = key({}, "Parameters of the advantage.")
    transform_params: Table = key(
        {}, "Parameters of the transform; its uncertainty_kind overrides the key of that name."
    )
    uncertainty_params: Table = key({}, "Parameters of an uncertainty plugin.")

    @property
    def modes(self) -> tuple[str, str]:
        """Return the advantage and the transform in use, or ("", "") for an algorithm plugin."""
        return modes_of(self.algorithm_mode, self.advantage_mode, self.transform_mode)

    @property
    def uncertainty(self) -> str:
        """The name in the transform's table, else `uncertainty_kind`."""
        return str(self.transform_params.get("uncertainty_kind", self.uncertainty_kind))

    def problems(self, config: Any) -> Violations:
        off = not config.may_be_positive("algorithm.surprisal_mask_rho")
        if off and "entropy_mask" in config.transforms:
            yield Violation(
                ("algorithm.surprisal_mask_rho", "algorithm.transform_mode"),
                '[algorithm] transform_mode = "entropy_mask" needs surprisal_mask_rho above 0 and'
                " at most 1, since at 0 it would be plain gtpo",
            )
        distils = not transforms_with("distils").isdisjoint(config.transforms)
        if distils and not self.teacher:
            yield Violation(
                ("algorithm.teacher", "algorithm.transform_mode", "algorithm.algorithm_mode"),
                '[algorithm] "distill" needs a teacher; set teacher to "base", "answer" or the'
                " folder of an adapter",
            )
        places = ("{prompt}", "{answer}")
        lacking = [place for place in places if place not in self.teacher_prompt]
        if self.teacher == "answer" and lacking:
            yield Violation(
                ("algorithm.teacher_prompt",),
                f"[algorithm] teacher_prompt has no {' and no '.join(lacking)}, so the teacher"
                " would not see it; write it where it belongs",
            )


class Schedule(Section):
    """Keys that move with the step: "section.key" = [[step, value], ...]."""

    # Editors must accept any "section.key".
    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    points: Table = key(
        {},
        'The schedules, "section.key" -> points [step, value], linear between them; a file may'
        " write each as a key of the section.",
    )

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        return gathered_schedule(data) if isinstance(data, dict) else data


def gathered_schedule(data: Json) -> Json:
    """Move entries with names "section.key", quoted or not, under `points`."""
    moved: Json = {}
    own = {}
    for name, value in data.items():
        if name in Schedule.model_fields:
            own[name] = value
        elif "." in name:
            moved[name] = value
        elif isinstance(value, dict):
            moved |= {f"{name}.{rest}": points for rest, points in _flat(value)}
        else:
            own[name] = value
    points = own.get("points", {})
    if isinstance(points, dict):
        own["points"] = {ALIASES.get(path, path): at for path, at in (points | moved).items()}
    return own


def _flat(table: Json) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables by their dotted names."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{rest}", inner) for rest, inner in _flat(value))
        else:
            yield name, value


class Gtpo(Section):
    """Entropy-weighted credit."""

    beta: float = key(
        0.1,
        "Strength of the weighting; 0 disables it, above 1 clips weights at 0.",
        ge=0,
        movable=True,
    )
    norm: Literal["completion", "group"] = key(
        "completion",
        "Tokens in the mean uncertainty.",
        applies_when="beta not in (0)",
    )
    negative: Literal["same", "inverse"] = key(
        "same",
        "Weighting of completions with negative advantage: the same, or by inverse uncertainty.",
        applies_when="beta not in (0)",
    )


class Hicra(Section):
    """Planning-token amplification."""

    alpha: float = key(
        0.2, "Amplification of planning tokens; 0 disables it.", ge=0, le=1, movable=True
    )


class Sepa(Section):
    """Selective entropy pooling and its schedule."""

    steps: int = key(500, "Duration of the linear ramp from 0 to 1.", ge=0)
    schedule: Literal["linear", "auto"] = key(
        "linear", "linear ramps; auto follows the decay of the uncertainty's variance."
    )
    delay_steps: int = key(50, "Steps before the ramp begins.", ge=0)
    correct_rate_gate: float = key(
        0.1,
        "Correct rate at which a step opens the gate, which stays open; 0 opens it from the start.",
        ge=0,
        le=1,
    )
    ema_decay: float = key(
        0.99,
        "Decay of the variance's moving average (auto).",
        ge=0,
        lt=1,
        applies_when="schedule not in (linear)",
    )
    var_threshold: float = key(
        0.2,
        "Fraction of the reference variance below which pooling starts; it completes as the"
        " variance goes to 0 (auto).",
        gt=0,
        applies_when="schedule not in (linear)",
    )
    warmup: int = key(
        50,
        "Steps before SEPA fixes the reference variance (auto).",
        ge=1,
        applies_when="schedule not in (linear)",
    )

    def problems(self, config: Any) -> Violations:
        if self.schedule == "linear" and self.steps == 0:
            for transform in config.transforms:
                if transform in transforms_with("uses_sepa_controller"):
                    yield Violation(
                        (
                            "sepa.steps",
                            "sepa.schedule",
                            "algorithm.transform_mode",
                            "algorithm.algorithm_mode",
                        ),
                        '[sepa] steps = 0 with schedule = "linear" turns SEPA off in'
                        f' "{transform}"; give steps of 1 or more, or schedule = "auto"',
                    )


class Planning(Section):
    """The detector of planning tokens."""

    detector: Literal["regex", "semantic"] = key("regex", "Method that finds planning tokens.")
    model: PathText = key(
        "all-MiniLM-L6-v2",
        "Sentence-transformers model of the semantic detector: its name or folder.",
        min_length=1,
        applies_when="detector not in (regex)",
    )
    threshold: float = key(
        0.02,
        "Margin by which a window must be nearer to planning than to execution (semantic).",
        ge=-2,
        le=2,
        applies_when="detector not in (regex)",
    )
    min_similarity: float = key(
        0.25,
        "Smallest similarity to planning (semantic).",
        ge=-1,
        le=1,
        applies_when="detector not in (regex)",
    )
    strategic_grams: Annotated[str | Strings, AfterValidator(check_grams)] = key(
        "",
        "Planning phrases as a list, a JSON array or comma-separated; empty means the built-in"
        " ones.",
        applies_when="detector not in (semantic)",
    )

    @property
    def grams(self) -> list[str]:
        """The configured phrases; empty means the built-in phrases."""
        return parse_grams(self.strategic_grams)
