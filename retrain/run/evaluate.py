"""`retrain eval`: the held-out accuracy of a run's checkpoint, or of a configuration's untrained model."""

from collections.abc import Callable
from pathlib import Path

from retrain.config import TrainConfig, load_config, replaced
from retrain.config.overrides import Overrides
from retrain.errors import ConfigurationError
from retrain.plugins import named_code
from retrain.records.checkpoint import Checkpoint, CheckpointStore
from retrain.records.evaluation import Evaluation
from retrain.records.run_folder import RunFolder
from retrain.run.interrupts import Interrupts
from retrain.run.notes import refuse_not_built, trust_note
from retrain.run.opening import stored_checkpoints
from retrain.run.parts import load_parts
from retrain.run.rollout import Watcher
from retrain.types import Completion


def evaluate_run(
    path: Path, *, checkpoint: int | None = None, overrides: Overrides, say: Callable[[str], None], trust: bool = False
) -> Evaluation:
    """Evaluate the run in the folder `path` at a checkpoint (the newest by default), or the untrained model of a TOML.

    Nothing is written. Code that a run's folder names, which anyone may have made, is executed only with `trust`.
    Raises ConfigurationError for a folder without a run, for one that names code, and for a checkpoint of a TOML.
    """
    folder = RunFolder(path)
    if path.is_dir() and not folder.config.is_file():
        raise ConfigurationError(f"{path} holds no run of retrain (no {folder.config.name}); name a run's folder or a configuration.")
    if not path.is_dir() and checkpoint is not None:
        raise ConfigurationError(f"--checkpoint {checkpoint} needs a run's folder, and {path} is a configuration.")
    stored = path.is_dir()  # a stored configuration is complete: the variables of today's shell are none of its business
    given = load_config(folder.config, overrides, environ={}) if stored else load_config(path, overrides)
    if stored and not trust and (named := named_code(given)):
        raise ConfigurationError(
            f"{folder.config} names Python code that its evaluation would execute: {'; '.join(named)}. "
            "Look at the code first, then add --trust."
        )
    if given.backend.shard_base:
        say("[backend] shard_base = true is unused here: retrain eval is one process and holds the whole model.")
    if note := trust_note(given):
        say(note)
    config = replaced(given, {"evaluation.at_end": True, "backend.shard_base": False})
    refuse_not_built(config)
    found = _checkpoint(folder, checkpoint, say) if path.is_dir() else None
    return _evaluate(config, found, say)


def _checkpoint(folder: RunFolder, step: int | None, say: Callable[[str], None]) -> Checkpoint | None:
    store = CheckpointStore(stored_checkpoints(folder))
    found = store.newest(say) if step is None else store.at(step)
    say(f"Evaluating {found.folder}" if found else f"{folder.path} has no checkpoint: evaluating the untrained model")
    return found


def _evaluate(config: TrainConfig, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> Evaluation:
    parts = load_parts(config, checkpoint.state().choices if checkpoint else None, say, learns=False)
    try:
        if checkpoint:
            parts.backend.load(checkpoint.folder)
        parts.backend.engine.sync(parts.backend.save_adapter, checkpoint.step if checkpoint else 0)
        assert parts.evaluator is not None  # evaluation.at_end asked for it
        with Interrupts() as interrupts:
            return parts.evaluator.run(checkpoint.step if checkpoint else 0, Watcher(interrupts.check, _ignore))
    finally:
        parts.close()


def _ignore(completion: Completion) -> None:
    """Nothing shows progress here."""
