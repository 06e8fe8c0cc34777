"""Rules between keys: combinations that would change the meaning of a run are refused, each in one
sentence.

A rule reads a configuration whose values are all allowed one by one, and yields what is wrong.
`load_config` applies all of them, so they need neither the model nor the machine; what needs those
is refused by the part that knows.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError

from retrain.config.keys import describe_field, is_settable
from retrain.config.learning_sections import BACKEND_OPTIONS, Backend
from retrain.config.names import (
    builtin_names,
    fixed_aggregation,
    folder_name,
    nearest,
    source_task,
    table,
    transforms_with,
)
from retrain.config.recipes import modes_of
from retrain.config.sections import AllSections
from retrain.config.values import MAX_COMPLETIONS, MAX_SEED
from retrain.errors import MAX_SENTENCES
from retrain.system import toml_value


@dataclass(frozen=True)
class Violation:
    """A broken rule. The loader adds the file and makes a sentence of it."""

    keys: tuple[str, ...]
    """The keys that the rule reads, as "section.key"; the first is the one to fix."""
    message: str
    """One sentence without its full stop."""


class RuleViolations(ValueError):
    """Raised for a configuration that breaks rules although each of its values is allowed."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(violation.message for violation in violations))


Violations = Iterator[Violation]
Rule = Callable[[AllSections], Violations]
_RULES: list[Rule] = []
_CAMPAIGN_RULES: list[Rule] = []
"""Rules about a campaign as a whole; all others are about its runs."""

EVALUATION_SECTIONS = frozenset(
    {
        "squeeze",
        "model",
        "data",
        "environment",
        "reward",
        "evaluation",
        "training",
        "inference",
        "backend",
        "plugins",
    }
)
"""The sections that a squeeze job with evaluate reads."""


def _rule(function: Rule) -> Rule:
    _RULES.append(function)
    return function


def _campaign_rule(function: Rule) -> Rule:
    _CAMPAIGN_RULES.append(function)
    return function


def broken_rules(config: AllSections) -> list[Violation]:
    """Every violation once, in the order of the rules. Conditions that set keys of their own are
    judged one by one (`arm_problems`).
    """
    own_keys = any(condition.sets_keys for condition in config.conditions)
    rules = [*([] if own_keys else _RULES), *_CAMPAIGN_RULES]
    found = dict.fromkeys(chain.from_iterable(rule(config) for rule in rules))
    return [violation for violation in found if is_read(config, violation.keys[0])]


def is_read(config: AllSections, path: str) -> bool:
    """Return True if the section of a key is read. A squeeze job does not train, so it reads few
    sections unless it evaluates.
    """
    if config.kind != "squeeze":
        return True
    read = frozenset({"squeeze"})
    if config.squeeze.evaluate and config.squeeze.output_path:
        read = EVALUATION_SECTIONS
    return path.partition(".")[0] in read


def transforms_of(config: AllSections) -> list[str]:
    """The transform of each condition."""
    return [modes_of(condition)[1] for condition in config.conditions]


@_rule
def _sepa_needs_a_ramp(config: AllSections) -> Violations:
    if config.sepa.schedule == "linear" and config.sepa.steps == 0:
        for transform in transforms_of(config):
            if transform in transforms_with("uses_sepa_controller"):
                yield Violation(
                    (
                        "sepa.steps",
                        "sepa.schedule",
                        "algorithm.transform_mode",
                        "algorithm.algorithm_mode",
                    ),
                    '[sepa] steps = 0 with schedule = "linear" keeps lambda at 0, so'
                    f' "{transform}" would equal the same without SEPA; give steps of 1 or more,'
                    ' or schedule = "auto"',
                )


@_rule
def _entropy_mask_needs_rho(config: AllSections) -> Violations:
    moved = "algorithm.surprisal_mask_rho" in config.schedule.points
    off = config.algorithm.surprisal_mask_rho == 0 and not moved
    if off and "entropy_mask" in transforms_of(config):
        yield Violation(
            ("algorithm.surprisal_mask_rho", "algorithm.transform_mode"),
            '[algorithm] transform_mode = "entropy_mask" needs surprisal_mask_rho above 0 and at'
            " most 1, since at 0 it would be plain gtpo",
        )


@_rule
def _distilling_needs_a_teacher(config: AllSections) -> Violations:
    algorithm = config.algorithm
    distils = not transforms_with("distils").isdisjoint(transforms_of(config))
    if distils and not algorithm.reference:
        yield Violation(
            ("algorithm.reference", "algorithm.transform_mode", "algorithm.algorithm_mode"),
            '[algorithm] "distill" needs a teacher; set reference to "base", "gold" or the folder'
            " of an adapter",
        )
    lacking = [
        place for place in ("{prompt}", "{answer}") if place not in algorithm.reference_prompt
    ]
    if algorithm.reference == "gold" and lacking:
        yield Violation(
            ("algorithm.reference_prompt",),
            f"[algorithm] reference_prompt has no {' and no '.join(lacking)}, so the teacher would"
            " not see it; write it where it belongs",
        )


@_rule
def _group_relative_advantages_need_two(config: AllSections) -> Violations:
    if config.training.group_size > 1:
        return
    for condition in config.conditions:
        advantage, _ = modes_of(condition)
        builtin = table("advantage").get(advantage)
        if builtin is not None and builtin.group_relative:
            yield Violation(
                ("training.group_size", "algorithm.advantage_mode"),
                "[training] group_size = 1 gives every completion an advantage of 0 with"
                f' "{advantage}", which compares within a group; give 2 or more',
            )
            return


@_rule
def _one_token_is_no_choice(config: AllSections) -> Violations:
    if config.training.top_k == 1:
        yield Violation(
            ("training.top_k",),
            "[training] top_k = 1 keeps one token, so all completions of a prompt are equal and"
            " nothing is learned; give 0 (off) or 2 or more",
        )


@_rule
def _one_checkpoint_is_not_enough(config: AllSections) -> Violations:
    if config.training.keep_checkpoints == 1:
        yield Violation(
            ("training.keep_checkpoints",),
            "[training] keep_checkpoints = 1 would leave nothing to fall back on when the newest is"
            " damaged; give 0 (all) or 2 or more",
        )


@_rule
def _a_step_has_an_end_and_fills_its_minibatches(config: AllSections) -> Violations:
    completions = config.training.batch_size * config.training.group_size
    if completions > MAX_COMPLETIONS:
        yield Violation(
            ("training.batch_size", "training.group_size"),
            f"[training] batch_size x group_size = {completions:,} completions per step, which are"
            f" held in memory at once; give {MAX_COMPLETIONS:,} at most",
        )
    if config.training.minibatches > completions:
        yield Violation(
            ("training.minibatches", "training.batch_size", "training.group_size"),
            f"[training] minibatches = {config.training.minibatches} is more than the {completions}"
            f" completions of a step (batch_size x group_size); give at most {completions}",
        )


@_rule
def _corrections_need_recomputed_logprobs(config: AllSections) -> Violations:
    if config.loss.correction != "none" and config.loss.old_logprobs != "recomputed":
        yield Violation(
            ("loss.correction", "loss.old_logprobs"),
            f'[loss] correction = "{config.loss.correction}" needs old_logprobs = "recomputed",'
            " since it weighs the learner's log-probs against the sampler's",
        )


@_rule
def _a_geometric_mean_needs_narrow_bounds(config: AllSections) -> Violations:
    if config.loss.correction == "geometric" and not (
        config.is_set("loss.correction_low") and config.is_set("loss.correction_high")
    ):
        yield Violation(
            ("loss.correction", "loss.correction_low", "loss.correction_high"),
            '[loss] correction = "geometric" needs correction_low and correction_high, since the'
            " mean ratio of a completion stays near 1 and the defaults would drop none; give bounds"
            " such as 0.999 and 1.001",
        )


@_rule
def _bounds_are_in_order(config: AllSections) -> Violations:
    loss, pressure = config.loss, config.backpressure
    if loss.correction_low > loss.correction_high:
        yield Violation(
            ("loss.correction_low", "loss.correction_high"),
            f"[loss] correction_low = {loss.correction_low} is above correction_high ="
            f" {loss.correction_high}, so every token is dropped",
        )
    if 0 < loss.dual_clip <= 1:
        yield Violation(
            ("loss.dual_clip",),
            f"[loss] dual_clip = {loss.dual_clip} would clip tokens on policy; give 0 (off) or a"
            " number above 1, such as 3",
        )
    low, high = loss.clips
    if loss.mode == "cispo" and low > high:
        unset = " (its default)" if loss.clip_high is None else ""
        yield Violation(
            ("loss.clip_low", "loss.clip_high", "loss.mode"),
            f'[loss] clip_low = {low} is above clip_high = {high}{unset}, and with mode = "cispo"'
            f" they bound the ratio itself; give a clip_low of at most {high}, or raise clip_high",
        )
    if pressure.min_batch_size > pressure.max_batch_size:
        yield Violation(
            ("backpressure.min_batch_size", "backpressure.max_batch_size"),
            f"[backpressure] min_batch_size = {pressure.min_batch_size} is above max_batch_size ="
            f" {pressure.max_batch_size}",
        )


@_rule
def _back_pressure_knows_each_step(config: AllSections) -> Violations:
    if config.backpressure.enabled and len(config.backend.device_list) > 1:
        yield Violation(
            ("backpressure.enabled", "backend.devices"),
            "[backpressure] enabled = true with two [backend] devices, where a step is sampled"
            " before the one before it has been measured; name one device, or leave it false",
        )


@_rule
def _k1_is_no_loss_term(config: AllSections) -> Violations:
    if config.loss.kl_coef > 0 and config.loss.kl_estimator == "k1":
        yield Violation(
            ("loss.kl_estimator", "loss.kl_coef"),
            '[loss] kl_estimator = "k1" as a loss term has an expected gradient of 0, so it would'
            ' add noise and no pull towards the base; use "k2" for KL(policy || base), or "k3" for'
            " KL(base || policy)",
        )


@_rule
def _clip_below_one(config: AllSections) -> Violations:
    loss = config.loss
    if loss.mode in ("ppo", "gspo") and loss.clip_low is not None and loss.clip_low >= 1:
        yield Violation(
            ("loss.clip_low", "loss.mode"),
            f"[loss] clip_low = {loss.clip_low} would clip the ratio at 1 - clip_low <= 0 with mode"
            f' = "{loss.mode}"; give a number below 1',
        )


@_rule
def _pass_at_k_needs_samples(config: AllSections) -> Violations:
    evaluation = config.evaluation
    samples = max(part.samples for part in evaluation.parts)
    if max(evaluation.k) > samples:
        yield Violation(
            ("evaluation.k", "evaluation.samples"),
            f"[evaluation] k = {evaluation.k} asks for pass@{max(evaluation.k)} of samples ="
            f" {samples}; give samples of {max(evaluation.k)} or more",
        )


@_rule
def _greedy_samples_are_equal(config: AllSections) -> Violations:
    for part in config.evaluation.parts:
        if part.temperature == 0 and part.samples > 1:
            yield Violation(
                ("evaluation.samples", "evaluation.temperature"),
                f"[evaluation] samples = {part.samples} would be {part.samples} equal"
                " completions at temperature = 0; give samples = 1 or a temperature above 0",
            )


def _repeated(values: Iterable[Any]) -> list[Any]:
    """The first value that is given twice, in a list; empty where each is given once."""
    return [value for value, count in Counter(values).items() if count > 1][:1]


@_rule
def _evaluation_tasks_are_of_its_sources(config: AllSections) -> Violations:
    evaluation = config.evaluation
    tasks = [source_task(source or config.data.source) for source in evaluation.sources]
    # The own source is named by "" alone; in a list nobody could tell which task it is.
    if len(tasks) > 1 and "" in evaluation.sources:
        yield Violation(
            ("evaluation.source",),
            '[evaluation] source = "" in a list is no source; name each of them',
        )
    for task in _repeated(tasks):
        yield Violation(
            ("evaluation.source",),
            f'[evaluation] source names the task "{task}" twice; rename a file, or drop one',
        )
    for name in [name for name in evaluation.tasks if name not in tasks][:1]:
        yield Violation(
            ("evaluation.tasks", "evaluation.source"),
            f'[evaluation] tasks has "{name}", and source gives {", ".join(tasks)}; name one'
            " of them",
        )


@_rule
def _rewards_have_what_they_need(config: AllSections) -> Violations:
    reward = config.reward
    if config.environment.provider:
        return
    held_out = config.evaluation.reward
    if "judge" in (*reward.types, held_out) and not reward.judge_model:
        yield Violation(
            ("reward.judge_model", "reward.type"),
            '[reward] type = "judge" needs judge_model, the model that judges, such as'
            ' "gpt-4o-mini"',
        )
    if reward.judge_template and "{completion}" not in reward.judge_template:
        yield Violation(
            ("reward.judge_template",),
            "[reward] judge_template has no {completion} in it, so the judge would not see what it"
            " judges; put it where the answer goes",
        )
    if "custom" in (*reward.types, held_out) and not reward.custom_module:
        yield Violation(
            ("reward.custom_module", "reward.type"),
            '[reward] type = "custom" needs custom_module, the Python module that holds the'
            " function",
        )
    builtin = table("reward").get(held_out)
    if builtin is not None and not builtin.verifies:
        how = "by chance" if held_out == "random" else "without their reference"
        yield Violation(
            ("evaluation.reward",),
            f'[evaluation] reward = "{held_out}" would judge held-out answers {how}; name the'
            ' reward that verifies them, such as "match"',
        )
    if PurePath(reward.custom_module).suffix == ".py" or "/" in reward.custom_module:
        parts = PurePath(reward.custom_module).with_suffix("").parts
        named = all(part.isidentifier() for part in parts)
        yield Violation(
            ("reward.custom_module",),
            f'[reward] custom_module = "{reward.custom_module}" is the name of a file; write its'
            f' module, "{".".join(parts) if named else parts[-1]}"',
        )
    if reward.weights and len(reward.weights) != len(reward.types):
        yield Violation(
            ("reward.weights", "reward.type"),
            f"[reward] weights has {len(reward.weights)} numbers and type has {len(reward.types)}"
            " rewards; give one weight for each",
        )
    for name in _repeated(kind for kind in reward.types if kind in builtin_names("reward")):
        yield Violation(
            ("reward.type",),
            f'[reward] type names "{name}" twice; give it once, with its weight',
        )


@_rule
def _negative_rewards_have_an_advantage(config: AllSections) -> Violations:
    reward = config.reward
    if config.environment.provider:
        return
    cause = ""
    if "overlong" in reward.types:
        cause = '[reward] type = "overlong" is negative'
    if reward.combine == "normalise_then_sum":
        cause = '[reward] combine = "normalise_then_sum" gives rewards around 0'
    if cause and any(modes_of(condition)[0] == "maxrl" for condition in config.conditions):
        yield Violation(
            ("algorithm.advantage_mode", "algorithm.algorithm_mode", "reward.type"),
            f"{cause}, and the advantage maxrl needs rewards of 0 or more; set [algorithm]"
            ' advantage_mode, such as "grpo" or "reinforce_pp"',
        )


@_rule
def _overlong_has_room(config: AllSections) -> Violations:
    reward, longest = config.reward, config.training.max_tokens
    if "overlong" in reward.types and reward.overlong_buffer > longest:
        yield Violation(
            ("reward.overlong_buffer", "training.max_tokens"),
            f"[reward] overlong_buffer = {reward.overlong_buffer} is above [training] max_tokens ="
            f" {longest}, so every completion would be overlong; give at most max_tokens",
        )


@_rule
def _files_have_a_path(config: AllSections) -> Violations:
    if config.environment.provider:
        return
    if config.data.source in ("jsonl", "parquet") and not config.data.path:
        yield Violation(
            ("data.path", "data.source"),
            f'[data] source = "{config.data.source}" needs path, the file or folder to read; or'
            " give the path as source",
        )


@_rule
def _template_has_a_place(config: AllSections) -> Violations:
    template = config.data.prompt_template
    if template is not None and "{prompt}" not in template:
        yield Violation(
            ("data.prompt_template",),
            "[data] prompt_template has no {prompt} in it, so every prompt would be the same; put"
            " it where the problem goes",
        )


_AN_ID = {
    "verifiers": "primeintellect/gsm8k",
    "reasoning_gym": "chain_sum",
}


@_rule
def _environments_are_complete(config: AllSections) -> Violations:
    environment = config.environment
    if environment.provider in builtin_names("environment") and not environment.id:
        yield Violation(
            ("environment.id", "environment.provider"),
            f'[environment] provider = "{environment.provider}" needs id, the environment to load,'
            f' such as "{_AN_ID[environment.provider]}"',
        )
    if environment.id and not environment.provider:
        yield Violation(
            ("environment.provider", "environment.id"),
            f'[environment] id = "{environment.id}" needs provider = "verifiers", else the run'
            " would train on [data] instead",
        )
    if environment.max_turns == 0:
        yield Violation(
            ("environment.max_turns",),
            "[environment] max_turns = 0 would end every episode before it starts; give -1 (no"
            " limit) or 1 or more",
        )


@_rule
def _one_squeezed_rank(config: AllSections) -> Violations:
    squeeze = config.squeeze
    if squeeze.per_layer and squeeze.compress_to:
        yield Violation(
            ("squeeze.compress_to", "squeeze.per_layer"),
            f"[squeeze] compress_to = {squeeze.compress_to} is one rank for all layers, and"
            " per_layer = true chooses one for each; leave one of them out",
        )


@_campaign_rule
def _campaign_base_has_no_algorithm(config: AllSections) -> Violations:
    if config.campaign is not None and config.algorithm.algorithm_mode:
        yield Violation(
            ("algorithm.algorithm_mode", "campaign"),
            f'[algorithm] algorithm_mode = "{config.algorithm.algorithm_mode}" in a campaign\'s'
            " base would override every condition; put it into a [[campaign.conditions]] in place"
            " of the two modes",
        )


@_campaign_rule
def _conditions_are_complete(config: AllSections) -> Violations:
    for number, condition in enumerate(
        config.campaign.conditions if config.campaign else (), start=1
    ):
        modes = ("advantage_mode", "transform_mode")
        missing = [name for name in modes if not getattr(condition, name)]
        if condition.algorithm_mode and len(missing) < 2:
            yield Violation(
                ("campaign.conditions",),
                f"[[campaign.conditions]] number {number} gives algorithm_mode ="
                f' "{condition.algorithm_mode}" and a mode that it replaces; keep one',
            )
        elif not condition.algorithm_mode and missing:
            yield Violation(
                ("campaign.conditions",),
                f"[[campaign.conditions]] number {number} lacks {' and '.join(missing)}; "
                "give advantage_mode and transform_mode, or algorithm_mode",
            )


@_campaign_rule
def _grid_varies_keys_of_a_run(config: AllSections) -> Violations:
    if config.campaign is None:
        return
    for path, values in config.campaign.grid.items():
        if not is_settable(path) or not values:
            why = "gives no value" if is_settable(path) else "names no key that a grid may vary"
            yield Violation(
                ("campaign.grid",),
                f'[campaign.grid] "{path}" = {toml_value(values)} {why}; name a key of a'
                ' run and its values, such as "training.lr" = [1e-5, 4e-5], and write algorithms'
                " and seeds as [[campaign.conditions]] and [campaign] seeds",
            )
        for number, condition in enumerate(config.campaign.conditions, start=1):
            if path in condition.sets:
                yield Violation(
                    ("campaign.grid", "campaign.conditions"),
                    f'[campaign.grid] varies "{path}", which [[campaign.conditions]] number'
                    f" {number} sets too; leave it out of one of them",
                )


@_campaign_rule
def _labels_are_unique(config: AllSections) -> Violations:
    if config.campaign is None:
        return
    seen: dict[str, tuple[int, str]] = {}
    for number, condition in enumerate(config.conditions, start=1):
        # Many disks do not tell upper from lower case.
        folder = folder_name(condition.label).casefold()
        first, label = seen.setdefault(folder, (number, condition.label))
        if first != number:
            names = f'called "{label}" and "{condition.label}"'
            if label == condition.label:
                names = f'both called "{label}"'
            yield Violation(
                ("campaign.conditions",),
                f"[[campaign.conditions]] numbers {first} and {number} are {names}, "
                "so their runs would share folders; give one a label of its own, or drop it",
            )


@_campaign_rule
def _seeds_are_unique(config: AllSections) -> Violations:
    for seed in _repeated(config.campaign.seeds if config.campaign else ()):
        yield Violation(
            ("campaign.seeds",),
            f"[campaign] seeds names {seed} twice; a repeated seed is the same run, not"
            " another sample",
        )


@_campaign_rule
def _evidence_may_take_every_seed(config: AllSections) -> Violations:
    campaign = config.campaign
    if campaign is None or campaign.stop != "evidence":
        return
    if 0 < campaign.max_seeds < len(campaign.seeds):
        yield Violation(
            ("campaign.max_seeds", "campaign.seeds"),
            f"[campaign] max_seeds = {campaign.max_seeds} is below the {len(campaign.seeds)} seeds"
            " that are named; raise it, or name fewer",
        )
    if max(campaign.seeds) + max(0, campaign.max_seeds - len(campaign.seeds)) > MAX_SEED:
        yield Violation(
            ("campaign.max_seeds", "campaign.seeds"),
            f"[campaign] max_seeds = {campaign.max_seeds} goes from seed {max(campaign.seeds)} to"
            f" above {MAX_SEED}; name smaller seeds",
        )


@_rule
def _an_algorithm_keeps_its_aggregation(config: AllSections) -> Violations:
    for mode in dict.fromkeys(condition.algorithm_mode for condition in config.conditions):
        fixed = fixed_aggregation(mode)
        if fixed and config.is_set("loss.aggregation") and config.loss.aggregation != fixed:
            yield Violation(
                ("loss.aggregation", "algorithm.algorithm_mode"),
                f'[loss] aggregation = "{config.loss.aggregation}" contradicts algorithm_mode ='
                f' "{mode}", which fixes aggregation = "{fixed}"; leave it out',
            )


@_rule
def _options_are_known(config: AllSections) -> Violations:
    """Check the options of every backend, whichever is chosen, so that a file can switch
    backends.
    """
    if config.backend.backend not in builtin_names("backend") or not config.backend.options:
        return
    for problem in _option_problems(config.backend):
        yield Violation(("backend.options",), f"[backend.options] {problem}")


def _option_problems(backend: Backend) -> Iterator[str]:
    """Clauses on wrong options, to follow the name of their table."""
    known = list(chain.from_iterable(model.model_fields for model in BACKEND_OPTIONS.values()))
    wrong = [name for name in backend.options if name not in known]
    for name in wrong[: MAX_SENTENCES - 1]:
        near = nearest(name, known)
        hint = f"known are {', '.join(known)}"
        if near:
            hint = f'did you mean "{near}"?'
        yield f"{name} is not a known option; {hint}"
    more = len(wrong[MAX_SENTENCES - 1 :])
    if more:
        yield f"{more:,} more of its names are not known options"
    for owner, model in BACKEND_OPTIONS.items():
        try:
            model.model_validate(backend.options_of(owner))
        except ValidationError as error:
            for problem in error.errors(include_url=False)[:MAX_SENTENCES]:
                name, value = str(problem["loc"][0]), toml_value(problem["input"])
                allowed = describe_field(model.model_fields[name])
                yield f"{name} = {value} is refused; allowed: {allowed}"
    if backend.options.get("strict_advantages") is False:
        yield (
            "strict_advantages = false is refused, since it would average per-token advantages in"
            " silence; leave it true"
        )
