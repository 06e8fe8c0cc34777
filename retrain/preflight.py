"""What a run says about its configuration before it begins: what is unused here, what may surprise, what is not built."""

from retrain.config import TrainConfig
from retrain.config.outcomes import not_built, unused_keys
from retrain.errors import ConfigurationError
from retrain.parallel import World
from retrain.sepa import maximal_lambda_note


def refuse_not_built(config: TrainConfig) -> None:
    """Raises ConfigurationError for every feature that the schema knows and this version does not have yet."""
    if problems := not_built(config):
        raise ConfigurationError(problems)


def refuse_lone_sharding(config: TrainConfig, world: World) -> None:
    """Raises ConfigurationError where the base is to be held in parts and nobody is there to hold the others."""
    if config.backend.shard_base:
        from retrain.backends.local.sharding import shards_of  # torch comes with it

        shards_of(config, world)


def preflight_lines(config: TrainConfig) -> list[str]:
    """One sentence a line."""
    return [*_origin_lines(config), *unused_keys(config), *notes(config)]


def notes(config: TrainConfig) -> list[str]:
    """What is allowed in a single run and may surprise, one sentence each."""
    found = (
        trust_note(config),
        maximal_lambda_note(config),
        _loss_note(config),
        _dropout_note(config),
        _split_note(config),
        _sharding_note(config),
        _back_pressure_note(config),
    )
    return [note for note in found if note]


def _origin_lines(config: TrainConfig) -> list[str]:
    """Values that a variable or a flag put over the file's, since the file alone would mislead."""
    return [
        f"{path} = {config.value(path)!r} from {origin}" for path, origin in config.provenance.items() if origin not in ("default", "file")
    ]


def trust_note(config: TrainConfig) -> str:
    """Said whenever a model is about to be loaded with code of its own."""
    if not config.model.trust_remote_code:
        return ""
    return f"[model] trust_remote_code = true: Python code that comes with {config.model.model} runs as this user."


def _loss_note(config: TrainConfig) -> str:
    """With one update a batch the ratio is 1 up to the mismatch of sampler and learner, so no clip can act (decision D29)."""
    loss, training = config.loss, config.training
    if loss.mode == "importance_sampling" or training.updates_per_batch * training.minibatches > 1:
        return ""
    return (
        f'[loss] mode = "{loss.mode}" with one update a batch: the ratio is 1 up to the mismatch of sampler and learner, so every mode '
        "gives the same gradient; the clip matters from [training] updates_per_batch or minibatches = 2 on."
    )


def _split_note(config: TrainConfig) -> str:
    """Two devices: what makes up for sampling by older weights."""
    if len(config.backend.device_list) < 2:
        return ""
    loss = config.loss
    if loss.old_logprobs == "sampler":
        correction = f'the ratio of [loss] mode = "{loss.mode}" is against the log-probs of the weights that sampled'
    elif loss.correction != "none":
        correction = f'[loss] correction = "{loss.correction}" weights the tokens by learner over sampler'
    else:
        correction = 'nothing corrects it with old_logprobs = "recomputed"; set [loss] correction = "tis" or "icepop"'
    return (
        f"Split mode: steps that follow neither a checkpoint nor an evaluation are sampled by weights one step old; {correction}, "
        "and ratio_mean, ess and mismatch_k1 show how far the two are apart."
    )


def _sharding_note(config: TrainConfig) -> str:
    if not config.backend.shard_base or config.kind == "squeeze":
        return ""
    return (
        "[backend] shard_base = true: every pass, that of each generated token too, gathers all layers from the other processes, so use it "
        "only where one GPU cannot hold the model; the memory that explain predicts is that of one process with the whole model."
    )


def _dropout_note(config: TrainConfig) -> str:
    """The sampler never drops anything, the learner does: its ratio against the sampled log-probs holds the masks too."""
    if not config.lora.dropout or config.loss.old_logprobs == "recomputed":
        return ""
    return (
        f"[lora] dropout = {config.lora.dropout:g} is off while sampling, so ratio_max and mismatch hold its effect and are not 1 and 0 "
        'before the first update; set [loss] old_logprobs = "recomputed" to take the ratio under the same masks.'
    )


def _back_pressure_note(config: TrainConfig) -> str:
    pressure = config.backpressure
    if not pressure.enabled:
        return ""
    return (
        f"[backpressure] changes the batch size, from {config.training.batch_size} to between {pressure.min_batch_size} and "
        f"{pressure.max_batch_size} prompts a step: steps differ in size and time, and runs of one seed see a prompt in different steps."
    )
