"""What a run says about its configuration before it begins: what is unused here, what may surprise, where each value came from."""

from retrain.advantages.algorithms import condition_parts
from retrain.config import TrainConfig, unused_keys
from retrain.sepa import maximal_lambda_note


def preflight_lines(config: TrainConfig) -> list[str]:
    """One sentence a line."""
    lines = [*unused_keys(config)]
    lines.extend(filter(None, [maximal_lambda_note(config), _loss_note(config)]))
    return lines


def value_lines(config: TrainConfig) -> list[str]:
    """`section.key = value  (origin)` for every key that is not at its default."""
    return []


def _loss_note(config: TrainConfig) -> str:
    """With one update a batch the ratio is 1 up to the mismatch of sampler and learner, so no clip can act (decision D29)."""
    loss, training = config.loss, config.training
    if loss.mode == "importance_sampling" or training.updates_per_batch * training.minibatches > 1:
        return ""
    return (
        f"[loss] mode = {loss.mode!r} with one update a batch: the ratio is 1 up to the sampler/learner mismatch, so every mode gives the "
        "same gradient; the clip matters from training.updates_per_batch or minibatches = 2 on."
    )
