"""Sections about problems and rewards.

A key's documentation says what it does. Its type and range say which values are valid, so the
sentence does not.
"""

import re
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from retrain.config.names import builtin_names, table
from retrain.config.section import (
    PathText,
    Section,
    ServerURL,
    Table,
    Violation,
    Violations,
    key,
    repeated,
)
from retrain.config.values import (
    OpenName,
    check_arguments,
    check_prices,
    check_variable,
    table_from_json,
    with_former_names,
)
from retrain.system import Json, toml_value

_DAY = re.compile(r"\d{4}-(0[1-9]|1[0-2])-([0-2]\d|30|31)")
DATE_ARGUMENT = "strftime_now"
"""The entry of `[data] chat_template_args` with the day, as 2026-11-28, that a chat template's
calls of `strftime_now` are about. A run sets it to the day of its first start."""


class Data(Section):
    """The problems."""

    source: Annotated[str, OpenName("data")] = key(
        "math",
        "Data source: built in, hub:NAME[:config][:split], a .jsonl or .parquet file or folder, or"
        " a plugin.",
    )
    path: PathText = key("", "File or folder for jsonl, parquet, or a local copy of math or gsm8k.")
    prompt_column: str = key("prompt", "Column that holds the problem.", min_length=1)
    answer_column: str = key("answer", "Column that holds the reference answer.", min_length=1)
    system_prompt: str = key("", "System message before every prompt; empty is none.")
    prompt_template: str | None = key(
        None,
        "Text around a problem, with {prompt} in it; unset asks math and gsm8k for steps and a"
        " box.",
        meaningful_unset=True,
        example="{prompt}\n",
    )
    chat_template_args: Table = key(
        {}, "Arguments of the tokenizer's chat template, such as enable_thinking = false."
    )
    difficulty: int = key(1, "Difficulty of the lab's arithmetic.", ge=1, le=6)
    params: Table = key({}, "Parameters of a data plugin.")
    sampler: Annotated[str, OpenName("sampler")] = key(
        "shuffle",
        "Prompts of a step: each once an epoch, by their difficulty so far, or a plugin.",
    )
    sampler_params: Table = key({}, "Parameters of the sampler, such as threshold = 0.9.")
    mix: list[Table] = key(
        [],
        "Sources to train on together, each a table [[data.mix]]. It holds source or"
        " environment, weight, name, reward, and the keys of this section in which it differs.",
    )

    def problems(self, config: Any) -> Violations:
        day = self.chat_template_args.get(DATE_ARGUMENT, "2026-01-01")
        if not (isinstance(day, str) and _DAY.fullmatch(day)):
            yield Violation(
                ("data.chat_template_args",),
                f"[data] chat_template_args: {DATE_ARGUMENT} = {toml_value(day)} is not a day"
                ' such as "2026-11-28"',
            )
        if self.source in ("jsonl", "parquet") and not (self.path or config.environment.provider):
            yield Violation(
                ("data.path", "data.source"),
                f'[data] source = "{self.source}" needs path, the file or folder to read; or give'
                " the path as source",
            )
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            yield Violation(
                ("data.prompt_template",),
                "[data] prompt_template has no {prompt} in it, so every prompt would be the same;"
                " put it where the problem goes",
            )


Arguments = Annotated[Json, BeforeValidator(table_from_json), AfterValidator(check_arguments)]


class Environment(Section):
    """Problems with a rubric, possibly over several turns."""

    provider: Annotated[str, OpenName("environment", may_be_empty=True)] = key(
        "", "Environment provider, built in or a plugin (a dotted path); empty is none."
    )
    id: str = key(
        "",
        "Environment id: such as primeintellect/gsm8k, or a task of reasoning_gym.",
    )
    args: Arguments = key({}, "Arguments of the environment, as a table or a JSON string.")
    max_turns: int = key(
        -1,
        "Maximum number of turns in multi-turn environments; -1 leaves it to the environment.",
        ge=-1,
    )
    auto_install: bool = key(False, "Install a missing environment from the Prime hub.")
    timeout_s: float = key(
        600.0,
        "Seconds that the environment itself may take for a trajectory; a slower one counts as not"
        " judged.",
        gt=0,
    )

    def problems(self, config: Any) -> Violations:  # noqa: ARG002 - a rule of one section
        if self.provider in builtin_names("environment") and not self.id:
            yield Violation(
                ("environment.id", "environment.provider"),
                f'[environment] provider = "{self.provider}" needs id, the environment to load,'
                f' such as "{_AN_ID[self.provider]}"',
            )
        if self.id and not self.provider:
            yield Violation(
                ("environment.provider", "environment.id"),
                f'[environment] id = "{self.id}" needs provider = "verifiers", else the run would'
                " train on [data] instead",
            )
        if self.max_turns == 0:
            yield Violation(
                ("environment.max_turns",),
                "[environment] max_turns = 0 would end every episode before it starts; give -1 (no"
                " limit) or 1 or more",
            )


_AN_ID = {
    "verifiers": "primeintellect/gsm8k",
    "reasoning_gym": "chain_sum",
}


RewardType = Annotated[str, OpenName("reward")]


class Reward(Section):
    """The reward of a completion."""

    type: RewardType | Annotated[list[RewardType], Field(min_length=1)] = key(
        "match", "Reward, or a list of rewards, which retrain adds by weight."
    )
    weights: list[float] = key([], "Weights of the rewards in the list; empty means 1 each.")
    combine: Annotated[
        Literal["sum", "normalize_then_sum"], with_former_names("reward.combine")
    ] = key(
        "sum",
        "How the rewards of a completion become one: the weighted sum, or each reward first"
        " normalized within its group.",
    )
    overlong_buffer: int = key(
        0,
        "Tokens before [training] max_tokens over which the overlong reward falls from 0 to -1; 0"
        " is a fifth of max_tokens.",
        ge=0,
        parameter_of=("overlong",),
    )
    judge_model: str = key(
        "", "Model of the judge reward, such as gpt-4o-mini.", parameter_of=("judge",)
    )
    judge_base_url: ServerURL = key(
        "",
        "Address of the judge, such as http://127.0.0.1:8000/v1; empty means"
        " https://api.openai.com/v1.",
        parameter_of=("judge",),
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    judge_api_key_env: Annotated[str, AfterValidator(check_variable)] = key(
        "OPENAI_API_KEY",
        "Environment variable that holds the judge's API key.",
        parameter_of=("judge",),
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    judge_template: str = key(
        "",
        "Question to the judge, with {question}, {reference} and {completion} in their"
        " places; empty is the built-in question.",
        parameter_of=("judge",),
    )
    judge_concurrency: int = key(
        8,
        "Maximum number of requests to the judge at a time.",
        ge=1,
        le=4096,
        parameter_of=("judge",),
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    judge_cache: bool = key(
        True,
        "Keep the judge's verdicts in the run's folder, and ask only once for equal completions.",
        parameter_of=("judge",),
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    judge_timeout_s: float = key(
        60.0,
        "Seconds for one answer of the judge.",
        gt=0,
        parameter_of=("judge",),
        may_change_at_resume=True,
        own_to_a_run=True,
    )
    judge_prices: Annotated[list[Annotated[float, Field(ge=0)]], AfterValidator(check_prices)] = (
        key(
            [],
            "Price of a million tokens that the judge reads, and of a million that it writes, for"
            " judge_cost in metrics.jsonl.",
            parameter_of=("judge",),
            may_change_at_resume=True,
            own_to_a_run=True,
        )
    )
    custom_module: str = key("", "Python module of the custom reward.", parameter_of=("custom",))
    custom_function: str = key(
        "score", "Function in that module.", min_length=1, parameter_of=("custom",)
    )
    random_p: float = key(
        0.5, "Probability of 1 in the random reward.", ge=0, le=1, parameter_of=("random",)
    )
    params: Table = key(
        {}, "Parameters of a custom or plugin reward.", parameter_of=("custom", "plugin")
    )
    after_think: bool = key(
        True,
        "Count a box, and show the judge, only what follows the completion's last thought.",
        parameter_of=("match", "math", "majority", "judge"),
    )
    think_end_token: str = key(
        "",
        "Tag that ends every thought of the model: an answer counts only after it. Tags such as"
        " </think>, [/THINK] and <|channel|>final<|message|> are known without it.",
        parameter_of=("match", "math", "majority", "judge"),
        applies_when="after_think not in (0)",
    )
    normalize: Literal["none", "hendrycks"] = key(
        "none",
        "Normalization of both sides before match or majority compares them.",
        parameter_of=("match", "majority"),
    )
    correct_threshold: float = key(0.5, "A completion is correct when its reward is above this.")
    max_failure_rate: float = key(
        0.05,
        "Stop when the reward could not judge more than this fraction of the last 20 steps'"
        " completions; 1 is off.",
        ge=0,
        le=1,
    )
    deadline_s: float = key(
        5.0, "Seconds that a verification may take before retrain kills it.", gt=0
    )
    workers: int = key(
        0,
        "Worker processes that verify; 0 chooses by the machine.",
        ge=0,
        le=1024,
        may_change_at_resume=True,
        own_to_a_run=True,
    )

    @property
    def types(self) -> list[str]:
        if isinstance(self.type, str):
            return [self.type]
        return list(self.type)

    @property
    def type_weights(self) -> list[float]:
        return list(self.weights) or [1.0] * len(self.types)

    def problems(self, config: Any) -> Violations:
        longest = config.training.max_tokens
        if "overlong" in self.types and self.overlong_buffer > longest:
            yield Violation(
                ("reward.overlong_buffer", "training.max_tokens"),
                f"[reward] overlong_buffer = {self.overlong_buffer} is above [training] max_tokens"
                f" = {longest}, so every completion would be overlong; give at most max_tokens",
            )
        if not config.environment.provider:
            yield from self._judge_problems(config.evaluation.reward)
            yield from self._module_problems(config.evaluation.reward)
            yield from self._sum_problems(config)

    def _judge_problems(self, held_out: str) -> Violations:
        if "judge" in (*self.types, held_out) and not self.judge_model:
            yield Violation(
                ("reward.judge_model", "reward.type"),
                '[reward] type = "judge" needs judge_model, the model that judges, such as'
                ' "gpt-4o-mini"',
            )
        if self.judge_template and "{completion}" not in self.judge_template:
            yield Violation(
                ("reward.judge_template",),
                "[reward] judge_template has no {completion} in it, so the judge would not see"
                " what it judges; put it where the answer goes",
            )
        builtin = table("reward").get(held_out)
        if builtin is not None and not builtin.verifies:
            how = "by chance" if held_out == "random" else "without their reference"
            yield Violation(
                ("evaluation.reward",),
                f'[evaluation] reward = "{held_out}" would judge held-out answers {how}; name the'
                ' reward that verifies them, such as "match"',
            )

    def _module_problems(self, held_out: str) -> Violations:
        if "custom" in (*self.types, held_out) and not self.custom_module:
            yield Violation(
                ("reward.custom_module", "reward.type"),
                '[reward] type = "custom" needs custom_module, the Python module that holds the'
                " function",
            )
        if PurePath(self.custom_module).suffix == ".py" or "/" in self.custom_module:
            parts = PurePath(self.custom_module).with_suffix("").parts
            named = all(part.isidentifier() for part in parts)
            yield Violation(
                ("reward.custom_module",),
                f'[reward] custom_module = "{self.custom_module}" is the name of a file; write its'
                f' module, "{".".join(parts) if named else parts[-1]}"',
            )

    def _sum_problems(self, config: Any) -> Violations:
        if self.weights and len(self.weights) != len(self.types):
            yield Violation(
                ("reward.weights", "reward.type"),
                f"[reward] weights has {len(self.weights)} numbers and type has {len(self.types)}"
                " rewards; give one weight for each",
            )
        for name in repeated(kind for kind in self.types if kind in builtin_names("reward")):
            yield Violation(
                ("reward.type",),
                f'[reward] type names "{name}" twice; give it once, with its weight',
            )
        cause = '[reward] type = "overlong" is negative' if "overlong" in self.types else ""
        if self.combine == "normalize_then_sum":
            cause = '[reward] combine = "normalize_then_sum" gives rewards around 0'
        if cause and "maxrl" in config.advantages:
            yield Violation(
                ("algorithm.advantage_mode", "algorithm.algorithm_mode", "reward.type"),
                f"{cause}, and the advantage maxrl needs rewards of 0 or more; set [algorithm]"
                ' advantage_mode, such as "grpo" or "reinforce_pp"',
            )
