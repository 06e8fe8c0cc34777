"""`retrain eval`: the held-out accuracy of a run's checkpoint, or of a configuration's untrained
model.
"""

from collections.abc import Callable
from pathlib import Path

from retrain.config import TrainConfig, load_config, replaced
from retrain.config.effects import sharding_note
from retrain.config.overrides import Overrides
from retrain.errors import ConfigurationError
from retrain.plugins import named_code
from retrain.records.checkpoint import Checkpoint, CheckpointStore
from retrain.records.checkpoint_place import stored_checkpoints
from retrain.records.evaluation import Evaluation
from retrain.records.redact import note_secrets
from retrain.records.run_folder import RunFolder
from retrain.run.dialogues import Watcher
from retrain.run.interrupts import Interrupts
from retrain.run.notes import trust_note
from retrain.run.parts import load_parts
from retrain.types import Group

Keep = Callable[[TrainConfig, Evaluation, list[Group]], object]
"""Called with the resolved configuration, the evaluation and its answers."""


def evaluate_run(
    path: Path,
    *,
    checkpoint: int | None = None,
    overrides: Overrides,
    say: Callable[[str], None],
    trust: bool = False,
    keep: Keep = lambda *_: None,
) -> Evaluation:
    """Evaluate the run in the folder `path` at a checkpoint (the newest by default), or the
    untrained model of a TOML.

    Nothing is written; `keep` gets the answers. Code named by a stored configuration, whose author
    may be anyone, is executed only with `trust`. Raises ConfigurationError for a folder without a
    run, for untrusted code, and for `checkpoint` beside a TOML.
    """
    folder, stored = RunFolder(path), path.is_dir()
    if stored and not folder.config.is_file():
        raise ConfigurationError(
            f"{path} holds no run of retrain (no {folder.config.name}); name a run's folder or a"
            " configuration."
        )
    if not stored and checkpoint is not None:
        raise ConfigurationError(
            f"--checkpoint {checkpoint} needs a run's folder, and {path} is a configuration."
        )
    # A stored configuration is complete, so RETRAIN_ variables of today's shell do not apply to it.
    if stored:
        given = load_config(folder.config, overrides, environ={})
    else:
        given = load_config(path, overrides)
    if stored and not trust and (named := named_code(given)):
        raise ConfigurationError(
            f"{folder.config} names Python code that its evaluation would execute:"
            f" {'; '.join(named)}. Read the code first, then add --trust."
        )
    note_secrets(given)
    for note in filter(None, (sharding_note(given, evaluates=True), trust_note(given.model))):
        say(note)
    config = replaced(given, {"evaluation.at_end": True, "backend.shard_base": False})
    found = None
    if stored:
        store = CheckpointStore(stored_checkpoints(folder))
        if checkpoint is None:
            found = store.newest_to_read(say)
        else:
            found = store.at(checkpoint)
        say(
            f"Evaluating {found.folder}"
            if found
            else f"{folder.path} has no checkpoint: evaluating the untrained model"
        )
    return _evaluate(config, found, say, keep)


def _evaluate(
    config: TrainConfig, checkpoint: Checkpoint | None, say: Callable[[str], None], keep: Keep
) -> Evaluation:
    step = checkpoint.step if checkpoint else 0
    parts = load_parts(
        config, checkpoint.state().choices if checkpoint else None, say, learns=False
    )
    try:
        if checkpoint:
            parts.backend.load(checkpoint.folder)
        parts.backend.engine.sync(parts.backend.save_adapter, step)
        assert parts.evaluator is not None  # evaluation.at_end asked for it
        with Interrupts() as interrupts:
            evaluation, groups = parts.evaluator.run_with_answers(
                step, Watcher(interrupts.check, lambda _: None)
            )
        keep(config, evaluation, groups)
        return evaluation
    finally:
        parts.close()
