"""`retrain eval`: the held-out accuracy of a run's checkpoint, or of a configuration's untrained
model.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from retrain.config import TrainConfig, load_config, replaced
from retrain.config.overrides import Overrides
from retrain.errors import ConfigurationError
from retrain.plugins import named_code
from retrain.records.checkpoint import Checkpoint, CheckpointStore
from retrain.records.checkpoint_place import stored_checkpoints
from retrain.records.evaluation import Evaluation
from retrain.records.redact import note_secrets
from retrain.records.run_folder import RunFolder, read_marker
from retrain.records.state import TrainerState
from retrain.run.dialogues import Watcher, counting
from retrain.run.interrupts import Interrupts
from retrain.run.notes import sharding_note, trust_note
from retrain.run.parts import load_parts
from retrain.run.start import other_heldout, with_prompt_date
from retrain.types import Group

Keep = Callable[[TrainConfig, Evaluation, list[Group]], object]
"""Called with the resolved configuration, the evaluation and its answers."""


def evaluate_run(
    path: Path,
    *,
    checkpoint: int | None = None,
    overrides: Overrides,
    log: Callable[[str], None],
    trust: bool = False,
    keep: Keep = lambda *_: None,
) -> Evaluation:
    """Evaluate the run in the folder `path` at a checkpoint (the newest by default), or the
    untrained model of a TOML.

    It writes no file; `keep` gets the answers. It executes code from a stored configuration, whose
    author may be anyone, only with `trust`. Raises ConfigurationError for a folder without a run,
    for untrusted code, and for `checkpoint` together with a TOML.
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
    if stored:
        read_marker(path)
        # It is complete, so RETRAIN_ variables of today's shell do not apply to it.
        given = load_config(folder.config, overrides, environ={})
        named = named_code(given)
        if named and not trust:
            raise ConfigurationError(
                f"{folder.config} names Python code that its evaluation would execute:"
                f" {'; '.join(named)}. Read the code first, then add --trust."
            )
    else:
        given = load_config(path, overrides)
    note_secrets(given)
    for note in filter(None, (sharding_note(given, evaluates=True), trust_note(given.model))):
        log(note)
    config = replaced(given, {"evaluation.at_end": True, "backend.shard_base": False})
    found = None
    if stored:
        store = CheckpointStore(stored_checkpoints(folder))
        found = store.newest_to_read(log) if checkpoint is None else store.at(checkpoint)
        line = f"{folder.path} has no checkpoint: evaluating the untrained model"
        if found:
            line = f"Evaluating {found.folder}"
        log(line)
        config = with_prompt_date(config, folder)
    result = evaluate_weights(config, found, log, keep)
    if stored and other_heldout(folder, given, result.heldout_sha256):
        log(
            f"The held-out examples differ from the run's own in {folder.path}, so the results"
            " are not comparable."
        )
    return result


def evaluate_weights(
    config: TrainConfig,
    found: Checkpoint | None,
    log: Callable[[str], None],
    keep: Keep = lambda *_: None,
) -> Evaluation:
    """Evaluate a checkpoint, or the initial weights of a run of `config`, which asks for an
    evaluation.
    """
    state = found.state() if found else TrainerState(config.training.seed, "")
    stage, step = state.place
    with closing(load_parts(config, state.choices, log, learns=False)) as parts:
        if found:
            parts.backend.load(found.folder)
        parts.backend.engine.sync(parts.backend.save_adapter, step)
        assert parts.evaluator is not None  # The configuration sets evaluation.at_end.
        with Interrupts() as interrupts:
            told = counting("Evaluation", parts.evaluator.completions, log)
            evaluation, groups = parts.evaluator.run(step, Watcher(interrupts.check, told), stage)
        keep(config, evaluation, groups)
        return evaluation
