"""Remarks at the start of a run: unused keys, and effects of the configuration that may
surprise.
"""

from collections.abc import Sequence
from pathlib import Path

from retrain.advantages.sepa import maximal_lambda_note
from retrain.backends.base import backend_kind
from retrain.config import TrainConfig, unused_keys
from retrain.config.moving import extremes, with_values
from retrain.config.names import bracketed, is_recipe, table
from retrain.config.recipes import departures, recipe
from retrain.config.removed import REDEFINED
from retrain.config.schema import DEFAULT_CLIPS, Loss, Model, Reward, Training
from retrain.data.chat import PLAIN_TEMPLATE
from retrain.data.lab import MAX_DIFFICULTY
from retrain.model.text import LAB_MODELS, base_name
from retrain.records.redact import Redactor
from retrain.records.terminal import counted
from retrain.records.untrained import ASKING, ASKING_TEMPLATE
from retrain.rewards import box_reader, unpaid_answer
from retrain.run.teacher import teacher_note
from retrain.system import read_object, toml_value
from retrain.types import Example, LogLine

_SOURCES = {
    "flag": "From flags",
    "environment": "From the environment",
    "drawn": "Drawn",
    "set": "Set in Python",
}
"""First word of an origin that the file does not show -> the beginning of its line."""


def preflight_lines(config: TrainConfig) -> list[str]:
    """Return the remarks at the start of a run, one sentence each."""
    # The file alone would mislead.
    shown = Redactor().config(config)
    given: dict[str, list[str]] = {}
    for path, origin in config.origins.items():
        source = _SOURCES.get(origin.split(" ")[0])
        if source and config.is_set(path):
            given.setdefault(source, []).append(f"{path} = {toml_value(shown.value(path))}")
    return [
        *(LogLine(f"{source}: {', '.join(values)}") for source, values in given.items()),
        *_recipe_line(config),
        *unused_keys(config),
        *notes(config),
    ]


def _recipe_line(config: TrainConfig) -> list[str]:
    """Say what the recipe of a single run sets; [] without one."""
    name = config.algorithm.algorithm_mode
    if not is_recipe(name):
        return []
    kept = [
        f"{bracketed(path)} = {toml_value(value)}"
        for path, value in recipe(name).items()
        if config.value(path) == value and path not in config.schedule.points
    ]
    return [f'algorithm_mode = "{name}" sets {", ".join(kept)}.']


def departure_note(config: TrainConfig) -> str:
    """Name the keys of the recipe that the user set differently; "" if there are none."""
    name, moved = config.algorithm.algorithm_mode, config.schedule.points
    yours = {path: toml_value(value) for path, value in departures(name, config.value).items()}
    if is_recipe(name):
        yours |= {path: "a schedule" for path in recipe(name) if path in moved}
    said = [f"{path.partition('.')[2]} to {value}" for path, value in yours.items()]
    if not said:
        return ""
    return f"Recipe {name}, but you set {', '.join(said)}."


def _spent_rate_note(training: Training) -> str:
    # A warm-up goes on to its end and to the peak, whatever the horizon.
    spent, steps = max(training.lr_horizon, training.lr_warmup_steps + 1), training.max_steps
    if training.lr_schedule == "constant" or not training.lr_horizon or spent >= steps:
        return ""
    return (
        f"From step {spent} on the learning rate is 0, so {counted(steps - spent, 'step')} of"
        f" {steps} will learn nothing."
    )


def notes(config: TrainConfig) -> list[str]:
    """Return the effects of a single run that users may not expect, one sentence each."""
    keys = ("algorithm.transform_mode", "algorithm.algorithm_mode", "sepa")
    # A resume may read the run's own file, which sets every key; its first start said it.
    chosen = not config.resume.from_ and any(map(config.is_set, keys))
    found = [
        trust_note(config.model),
        _full_note(config),
        _spent_rate_note(config.training),
        departure_note(config),
        REDEFINED * (config.algorithm.algorithm_mode == "dr_grpo"),
        maximal_lambda_note(config.algorithm, config.sepa, config.training.max_steps)
        if chosen
        else "",
        _loss_note(config),
        _certainty_note(config, chosen),
        _lab_note(config),
        _dropout_note(config.dropout, config.loss),
        _truncation_note(config),
        _split_note(config),
        teacher_note(config),
        "[sft] evaluate_every alone measures the log-prob of held-out traces; set [evaluation]"
        " at_end = true to evaluate held-out problems at those steps too."
        if config.sft.is_on and config.sft.evaluate_every and not config.evaluation.asked_for
        else "",
    ]
    if config.kind != "squeeze" and config.training.temperature == 1:
        found.append(backend_kind(config.backend.backend).temperature_note)
    found.append(sharding_note(config))
    pressure = config.backpressure
    if pressure.enabled:
        found.append(
            f"[backpressure] changes the batch size, from {config.training.batch_size} to"
            f" between {pressure.min_batch_size} and {pressure.max_batch_size} prompts per"
            " step. Steps differ in size and time, and runs of one seed see a prompt in"
            " different steps."
        )
    return [note for note in (*found, *_initial_notes(config)) if note]


def sharding_note(config: TrainConfig, *, evaluates: bool = False) -> str:
    """Return a sentence on the cost of [backend] shard_base = true, or on `retrain eval`, which
    does not use it; "" if it is false.
    """
    if not config.backend.shard_base or config.kind == "squeeze":
        return ""
    if evaluates:
        return (
            "[backend] shard_base = true has no effect here: retrain eval runs in one process,"
            " which holds the whole model."
        )
    return (
        "[backend] shard_base = true gathers all layers in every forward pass, also for each"
        " generated token. Use it only if one GPU cannot hold the model. The memory that"
        " explain predicts is for one process with the whole model."
    )


def skipped_gate_line(config: TrainConfig) -> str:
    """Say what `--skip-parity` leaves unchecked."""
    training, backend = config.training, config.backend.backend
    sampler = f"sampler of backend = {toml_value(backend)}"
    if backend_kind(backend).in_process:
        sampler = f"{config.inference.engine} engine"
    return (
        f"Parity gate skipped (--skip-parity): retrain does not check that the {sampler}"
        " samples from the trained policy. Unchecked: log-probs at temperature"
        f" {training.temperature:g}, adapter, cached prefixes, end-of-sequence token, chat"
        " template, reference answers."
    )


def answer_notes(
    config: TrainConfig, prompts: Sequence[str], examples: Sequence[Example]
) -> list[str]:
    """Return the remarks on the data's answers, one sentence each."""
    said = reference_note(config.reward, examples)
    return [note for note in (unasked_note(config, prompts), said and f"{said}.") if note]


def unasked_note(config: TrainConfig, prompts: Sequence[str]) -> str:
    """Warn if the reward reads a box that no prompt asks for; "" otherwise. The lab models answer
    in a box unasked.
    """
    if (
        box_reader(config.reward) is None
        or config.model.model in LAB_MODELS
        or any(_BOX in prompt for prompt in prompts)
    ):
        return ""
    template, asking = config.data.prompt_template, ASKING_TEMPLATE
    if template not in (None, PLAIN_TEMPLATE):
        asking = toml_value(f"{template} {ASKING}")
    return (
        f"[reward] type = {toml_value(config.reward.type)} reads the last {_BOX}{{}} of a"
        f" completion, and none of {counted(len(prompts), 'prompt')} asks for one, so most"
        f" rewards will be 0. Set [data] prompt_template = {asking}."
    )


def reference_note(reward: Reward, examples: Sequence[Example], share: float = 0.0) -> str:
    """Name the references that hold more than an answer, so that the reward does not pay the bare
    answer. Return "" if they are at most this share.
    """
    unpaid = [(each, bare) for each in examples if (bare := unpaid_answer(reward, each))]
    if len(unpaid) <= share * len(examples):
        return ""
    example, bare = unpaid[0]
    return (
        f"{len(unpaid):,} of {len(examples):,} references hold more than the answer. For"
        f" example, [reward] type = {toml_value(reward.type)} gives 0 to {bare} for"
        f" {example.reference[:_SHOWN]!r} ({example.example_id}). Write the bare answer there"
    )


_BOX = r"\boxed"
_SHOWN = 60
"""Characters of a reference in a message."""
_ROOM = 0.01
"""Distance of a clip bound from 1 that the mismatch of sampler and learner in float32 never
reaches."""


def trust_note(model: Model) -> str:
    """Warn if the model comes with its own code, before it loads."""
    if not model.trust_remote_code:
        return ""
    return (
        f"[model] trust_remote_code = true: Python code that comes with {model.model} runs as this"
        " user."
    )


def _certainty_note(config: TrainConfig, chosen: bool) -> str:
    """Warn of a mask or a `chosen` transform on the lab model. The least likely 5% of its tokens
    hold 92% of the squared gradient (1 - p)^2 of a log-prob at its own logit.
    """
    # Measured on grpo+none, 32 prompts x 4, temperature 1, the untrained adapter.
    transform, rho = config.algorithm.modes[1], "algorithm.surprisal_mask_rho"
    masks = config.algorithm.surprisal_mask_rho or rho in config.schedule.points
    weighs = chosen and transform != "none"
    if not (transform and (weighs or masks) and config.model.model == "lab"):
        return ""
    return (
        "This model is certain of most tokens: 5% of them carry 92% of the gradient, so token-level"
        " credit can change little."
    )


def _full_note(config: TrainConfig) -> str:
    """Say what `[model] train = "full"` decides if the user does not."""
    unset = [
        f"{name} = {toml_value(getattr(config.training, name))}"
        for name in ("lr", "keep_checkpoints")
        if not config.is_set(f"training.{name}")
    ]
    if config.model.train != "full" or not unset:
        return ""
    return f'[training] {" and ".join(unset)}, the default with [model] train = "full".'


def _lab_note(config: TrainConfig) -> str:
    """Warn if the second lab model gets other problems than it knows."""
    data = config.data
    if config.model.model != "lab2" or data.source != "lab" or data.difficulty == MAX_DIFFICULTY:
        return ""
    return (
        f'[data] difficulty = {data.difficulty} with [model] model = "lab2", which knows only'
        f" sums of four numbers; set [data] difficulty = {MAX_DIFFICULTY}."
    )


def _loss_note(config: TrainConfig) -> str:
    """Warn about a clip without effect in every step of a schedule. With one update per step the
    ratio is 1 up to the mismatch of sampler and learner.
    """
    steps = [values for _, values in extremes(config)] or [{}]
    if not all(_clips_nothing(with_values(config, values)) for values in steps):
        return ""
    effect = "never clips, so it has the gradient of importance_sampling. The clip"
    if _is_own(config.loss):
        effect = "has a ratio of 1 up to the mismatch of sampler and learner. A clip of it"
    return (
        f'[loss] mode = "{config.loss.mode}" with one update per step {effect} acts with'
        " [training] updates_per_batch or minibatches of at least 2; clip_fraction says how often."
    )


def _is_own(loss: Loss) -> bool:
    return loss.mode not in table("loss")


def _clips_nothing(config: TrainConfig) -> bool:
    """Return True if the clip cannot act, whatever the device.

    Against recomputed log-probs, the first update's ratios are 1. Against the sampler's log-probs
    they contain rounding, dropout, and in split mode a step of learning. The warning still comes if
    they lie inside the clip on any device.
    """
    loss, training, own = config.loss, config.training, _is_own(config.loss)
    clips = own or loss.mode in DEFAULT_CLIPS
    if not clips or training.updates_per_batch * training.minibatches > 1:
        return False
    low, high = loss.clips
    if loss.mode == "cispo":
        low, high = 1 - low, high - 1
    if loss.old_logprobs == "recomputed":
        return own or (low > 0 and high > 0)
    if config.dropout or len(config.backend.device_list) > 1:
        return False
    room = _ROOM
    if loss.mode == "gspo" and not config.is_set("loss.old_logprobs"):
        room = min(DEFAULT_CLIPS["gspo"])  # Half precision recomputes them.
    return own or min(low, high) >= room


def _split_note(config: TrainConfig) -> str:
    """Say what corrects for sampling with older weights, if there are two devices."""
    if len(config.backend.device_list) < 2:
        return ""
    loss = config.loss
    if loss.mode == "gspo" and not config.is_set("loss.old_logprobs"):
        correction = (
            'the ratio of [loss] mode = "gspo" corrects it, but not in half precision; there'
            ' set old_logprobs = "recomputed" and correction = "tis"'
        )
    elif loss.old_logprobs == "sampler":
        correction = (
            f'the ratio of [loss] mode = "{loss.mode}" is against the log-probs of the weights that'
            " sampled"
        )
    elif loss.correction != "none":
        correction = (
            f'[loss] correction = "{loss.correction}" weights the tokens by learner over sampler'
        )
    else:
        correction = (
            'nothing corrects it with old_logprobs = "recomputed"; set [loss] correction = "tis" or'
            ' "icepop"'
        )
    return (
        "Split mode samples with weights one step old, except after a checkpoint or an"
        f" evaluation. For this, {correction}. The metrics ratio_mean, ess and mismatch_k1 show"
        " how far sampler and learner differ."
    )


def _dropout_note(dropout: float, loss: Loss) -> str:
    """Explain that the ratio contains dropout masks, since the learner applies dropout and the
    sampler does not.
    """
    if not dropout:
        return ""
    ratio = (
        'the loss\'s ratio contains it too, unless [loss] old_logprobs = "recomputed" takes it'
        " under the same masks."
    )
    if loss.old_logprobs == "recomputed":
        ratio = "the loss takes its ratio against log-probs recomputed under the same masks."
    return (
        f"[lora] dropout = {dropout:g} is off while sampling, so ratio_mean, ess and mismatch_k1"
        f" differ from 1, 1 and 0 before the first update; {ratio}"
    )


def _initial_notes(config: TrainConfig) -> list[str]:
    """Say which KL and which base `[lora] init_from` brings; [] without it."""
    folder, model, found = config.lora.init_from, config.model.model, []
    warm = "[lora] init_from" if folder else "[sft]" if config.sft.is_on else ""
    if warm and config.may_be_positive("loss.kl_coef") and config.loss.kl_reference == "base":
        found.append(
            f"[loss] kl_coef with {warm} pulls toward the base model. To pull toward the"
            ' weights before the first step, set [loss] kl_reference = "start".'
        )
    settings = Path(folder) / "adapter_config.json"
    if folder and settings.is_file():
        base = read_object(settings).get("base_model_name_or_path")
        if base and base_name(str(base)) != base_name(model):
            found.append(
                f'[lora] init_from = "{folder}" belongs to the base model {base}, and [model]'
                f" model is {model}. Unless that is a copy of the same model, set [model] model"
                f" = {toml_value(str(base))}."
            )
    return found


def _truncation_note(config: TrainConfig) -> str:
    """Name the consequences of a truncated policy."""
    if not config.training.truncated:
        return ""
    values = ", ".join(
        f"{key} = {config.value(f'training.{key}'):g}"
        for key in ("top_k", "top_p", "min_p")
        if config.is_set(f"training.{key}")
    )
    kl = ""
    if config.may_be_positive("loss.kl_coef"):
        kl = "; the KL term is against the whole distribution of [loss] kl_reference"
    return (
        f"[training] {values}: retrain samples and trains the distribution over the kept"
        " tokens, also for log-probs, surprisals and entropies. A position with one kept token"
        f" trains nothing{kl}."
    )
