"""Start a run, new or resumed, in a locked folder of its own."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from time import monotonic
from typing import Any

from retrain.backends.declared import loss_notes
from retrain.backends.rows import learning_rate
from retrain.config import (
    TrainConfig,
    config_from_toml,
    config_hash,
    dump_toml,
    load_stored,
    replaced,
    resume_differences,
    with_drawn_seed,
)
from retrain.config.data_sections import DATE_ARGUMENT
from retrain.config.stored import WITH_OTHER_STEPS
from retrain.data.prompts import query_of
from retrain.data.traces import trace_query
from retrain.distributed import World
from retrain.errors import ConfigurationError, RetrainError, RunFailed
from retrain.model.text import model_fingerprint, placed
from retrain.records.checkpoint import STATE, Checkpoint, CheckpointStore
from retrain.records.checkpoint_place import checkpoint_folder, sign, stored_checkpoints, take
from retrain.records.disk import put_back, remove_empty, replace_file
from retrain.records.jsonl import aside_of
from retrain.records.redact import Redactor
from retrain.records.run_folder import MARKER, RunFolder, kind_of, writer_lock
from retrain.records.state import TrainerState
from retrain.run.gate import GateResult
from retrain.run.parts import RunParts
from retrain.run.saver import steps_at
from retrain.system import Json, read_object


@dataclass(frozen=True)
class RunStart:
    """A locked run folder, with what an earlier session left in it."""

    config: TrainConfig
    """The configuration with the drawn seed, and with the log_dir of the resumed run."""
    folder: RunFolder
    store: CheckpointStore
    state: TrainerState
    checkpoint: Checkpoint | None
    """The checkpoint to load; with None the run starts at step 0."""
    notes: tuple[str, ...]
    began: float = field(default_factory=monotonic)


@contextmanager
def open_together(config: TrainConfig, overwrite: bool, world: World) -> Iterator[RunStart]:
    """Open the folder on rank 0, which holds its lock, and tell the other ranks what it found."""
    config.backend.splits_base(world.size)
    if not world.is_rank_zero:
        found: RunStart | RetrainError | None = world.broadcast(None)
        if isinstance(found, RetrainError):
            raise SystemExit(found.exit_code)  # Rank 0 prints the sentence.
        assert found is not None
        yield found
        return
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(open_run(config, overwrite=overwrite))
        except RetrainError as error:
            world.broadcast(error)
            raise
        yield world.broadcast(opened)


@contextmanager
def open_run(config: TrainConfig, *, overwrite: bool) -> Iterator[RunStart]:
    """Hold the run folder's lock for as long as the context lasts.

    Raises ConfigurationError for a folder that the run may not use, and for keys that may not
    change at resume.
    """
    if config.kind == "campaign":
        raise ConfigurationError(
            f"{config.source_path or 'the configuration'} is a campaign, not a single run; start it"
            " with `retrain FILE` or retrain.campaign.run_campaign."
        )
    resuming = bool(config.resume.from_)
    folder = RunFolder(config.folder)
    folder.refuse_run(resuming=resuming)
    places = [folder.path]
    if config.backend.adapter_path:
        places.append(Path(config.backend.adapter_path) / folder.path.name)
    missing = [missing_folders(place) for place in places]
    folder.create()
    with writer_lock(folder), no_trace_of_a_refusal(folder, *missing):
        folder.put_back()
        # Asked again, since another process may have made its run here before we had the lock.
        holds_run = folder.holds_run()
        if resuming and holds_run:
            yield _reopen(config, folder)
        elif holds_run and not overwrite:
            raise ConfigurationError(
                f"{folder.path} already holds a run: continue it with"
                f" `{folder.resume_command}`, start over with --overwrite, or choose another"
                " [logging] log_dir."
            )
        else:
            try:
                yield _open_new(config, folder, resuming, overwrite)
            except BaseException:
                folder.put_back()  # Restore what --overwrite would replace, if no run has begun.
                raise
            folder.forget()


@contextmanager
def no_trace_of_a_refusal(
    folder: RunFolder, made: Sequence[Path], elsewhere: Sequence[Path] = ()
) -> Iterator[None]:
    """Delete the folders `made` if retrain refuses the run before it begins, so that the corrected
    command is a first one.

    `elsewhere`: the folders of its checkpoints, outside of its own.
    """
    try:
        yield
    except RetrainError as error:
        # A mistake in the configuration may show after this opens the files, but before the first
        # line of numbers.
        files = [folder.config]
        if isinstance(error, ConfigurationError):
            files = [folder.metrics, folder.evaluation]
        if made and not any(path.is_file() for path in files):
            if elsewhere and elsewhere[0].is_dir():
                CheckpointStore(elsewhere[0]).empty()
                (elsewhere[0] / MARKER).unlink(missing_ok=True)
                remove_empty(elsewhere)
            folder.empty()
            for path in (folder.marker, folder.lock_owner, folder.lock):
                path.unlink(missing_ok=True)
            remove_empty(made)
        raise


def missing_folders(path: Path) -> list[Path]:
    """Return the folders that making `path` creates, each one before its parent."""
    path = path.resolve()
    return list(takewhile(lambda one: not one.exists(), (path, *path.parents)))


def _open_new(config: TrainConfig, folder: RunFolder, resuming: bool, overwrite: bool) -> RunStart:
    config = with_drawn_seed(config)
    checkpoints = checkpoint_folder(config.backend, folder, overwrite)
    folder.set_aside()
    store = CheckpointStore(checkpoints, config.training.keep_checkpoints)
    if not store.steps():  # Keep the checkpoints of a replaced run as long as its files.
        take(checkpoints, folder)
    notes = []
    if resuming:
        notes.append(_no_checkpoint_line(folder))
    outer = folder.outer_run()
    if outer:
        notes.append(f"{folder.path} lies inside the folder of the run {outer.path}.")
    return RunStart(config, folder, store, _first_state(config), None, tuple(notes))


def _first_state(config: TrainConfig) -> TrainerState:
    return TrainerState(
        seed=config.training.seed,
        config_hash=config_hash(config),
        batch_size=config.training.batch_size,
    )


def _no_checkpoint_line(folder: RunFolder) -> str:
    return f"{folder.path} has no checkpoint yet: starting at step 0."


def refuse_resume(config: TrainConfig) -> None:
    """Raise ConfigurationError as a resume of `config` would. This changes no file."""
    folder = RunFolder(config.folder)
    folder.refuse_run(resuming=True)
    if folder.holds_run():
        _continued(config, folder, repairs=False)


def _reopen(config: TrainConfig, folder: RunFolder) -> RunStart:
    """Open a folder to resume its run. The folder does not change before it is certain that the run
    can continue.
    """
    found = _continued(config, folder)
    config, store, state, notes = found.config, found.store, found.state, list(found.notes)
    if store.folder != folder.checkpoints:
        sign(store.folder, folder)
    _forget_summary(folder, state.step, notes)
    if found.checkpoint:
        notes.append(f"Resuming {folder.path} after {steps_at(state.place)}.")
        if state.stage == "rl" and state.step == config.training.max_steps:
            steps, more = state.step, f"--max-steps {2 * state.step or 1}"
            if config.training.lr_schedule != "constant":
                more += f" --lr-horizon {2 * steps or 1}"
            notes.append(
                f"This run is complete: {steps} steps of [training] max_steps = {steps}."
                f" To train longer: `{folder.resume_command} {more}`."
            )
        replace_file(folder.trainer_state, (found.checkpoint.folder / STATE).read_bytes())
        folder.cut_to(state, notes.append)
    else:
        notes.append(_no_checkpoint_line(folder))
        folder.forget_steps()
    aside = aside_of(folder.metrics)
    if aside.exists():
        notes.append(
            f"{aside} holds the rows of the steps that retrain makes again, until it writes the"
            " first of them."
        )
    store.make_room_after(state, notes.append)
    return replace(found, notes=tuple(notes))


def _continued(config: TrainConfig, folder: RunFolder, *, repairs: bool = True) -> RunStart:
    """Return where a run continues. If it `repairs`, it finishes a killed save of a checkpoint, and
    changes nothing else. Raises ConfigurationError if the run cannot continue with `config`.
    """
    _refuse_damaged(folder)
    config = _resumed_config(config, folder)
    notes: list[str] = []
    store = CheckpointStore(stored_checkpoints(folder), config.training.keep_checkpoints)
    if repairs:
        put_back(store.folder)
    checkpoint = _newest(store, folder, notes)
    state = _first_state(config)
    if checkpoint:  # Other max_steps may come with another end of a falling rate.
        state = replace(checkpoint.state(), config_hash=state.config_hash)
    _refuse_other_steps(load_stored(folder.config), config, state.step)
    goes_on = state.step < config.training.max_steps
    if checkpoint and goes_on and checkpoint.holds_weights_alone:
        raise ConfigurationError(
            f"{checkpoint.folder} holds only weights, as a finished run of a campaign does; start a"
            " new run with that folder's export as [model] model."
        )
    return RunStart(config, folder, store, state, checkpoint, tuple(notes))


def _refuse_damaged(folder: RunFolder) -> None:
    """Raise ConfigurationError for a folder in which a resume would write outside its own files, or
    that lost its config.toml.
    """
    folders = folder.folders()
    for path in (*folders, *folder.lines(), folder.verdicts, folder.output):
        if path.is_symlink():
            problem = f"{path} is a link, and retrain changes nothing behind a link"
            raise NotResumable(folder, problem, "put the file or folder itself there")
        if path in folders and path.exists() and not path.is_dir():
            problem = f"{path} is a file, and a run keeps a folder of that name"
            raise NotResumable(folder, problem, "move the file away")
    if not folder.config.is_file():
        raise NotResumable(folder, f"{folder.config.name} is missing")


def _resumed_config(config: TrainConfig, folder: RunFolder) -> TrainConfig:
    """Return `config` with the log_dir of the resumed run and the seed that it drew. Raises
    ConfigurationError for keys that may not change at resume.
    """
    stored = load_stored(folder.config)
    changes: dict[str, object] = {"logging.log_dir": str(folder.path)}
    if config.training.seed == -1:  # The run drew its seed when it began.
        changes["training.seed"] = stored.training.seed
    config = replaced(config, changes, origin="file")  # The values come from the run's own file.
    # config.toml masks credentials, so they must not count as a difference.
    masked = config_from_toml(dump_toml(Redactor().config(config)), config.source_path)
    differences = resume_differences(placed(stored), placed(masked))
    if differences:
        raise ConfigurationError(differences)
    return config


def _refuse_other_steps(stored: TrainConfig, config: TrainConfig, step: int) -> None:
    """Raise ConfigurationError if `config` has fewer steps than `step`, which the run took, or if
    other max_steps would move the end of a falling rate.
    """
    before, after = stored.training, config.training
    if step > after.max_steps:
        raise ConfigurationError(
            f"[training] max_steps = {after.max_steps} is too small for a run that has taken"
            f" {step} steps; give {step} or more, or start a new run."
        )
    same_end = before.max_steps == after.max_steps or before.lr_schedule == "constant"
    other_rate = any(stored.value(key) != config.value(key) for key in WITH_OTHER_STEPS)
    if same_end or other_rate or after.lr_horizon:
        return
    steps = sorted({step, before.max_steps - 1, after.max_steps - 1})
    choices = []
    for horizon in (before.max_steps, after.max_steps):
        training = replaced(config, {"training.lr_horizon": horizon}).training
        rates = ", ".join(f"{learning_rate(training, each):.3g}" for each in steps)
        choices.append(f"--lr-horizon {horizon} makes it {rates}")
    raise ConfigurationError(
        f"[training] max_steps = {after.max_steps} instead of {before.max_steps} would change"
        f" the learning rate, which is {before.lr_schedule}. At steps"
        f" {', '.join(map(str, steps))} {' and '.join(choices)}. Choose one, or another"
        " --lr-schedule."
    )


def with_prompt_date(config: TrainConfig, folder: RunFolder) -> TrainConfig:
    """Return the `placed` configuration with the day on which the run or its campaign began, for a
    chat template's `strftime_now`.
    """
    day, campaign = None, folder.path.resolve().parent.parent
    if folder.environment.exists():
        day = read_object(folder.environment).get("prompt_date")
    with suppress(RunFailed):  # The file may not be ours.
        if day is None and kind_of(campaign) == "campaign":
            begun = str(read_object(campaign / "manifest.json").get("timestamp"))
            day = re.sub(r"(\d{4})(\d\d)(\d\d)_\d+", r"\1-\2-\3", begun)
    today = datetime.now().astimezone().date().isoformat()
    arguments = {DATE_ARGUMENT: day or today, **config.data.chat_template_args}
    return replaced(placed(config), {"data.chat_template_args": arguments})


def refuse_other_data(opened: RunStart, parts: RunParts) -> None:
    """Raise ConfigurationError if the run has trained or evaluated on other examples so far. Its
    place among them, a sampler's view of them, and its earlier results would have another meaning.
    """
    if opened.checkpoint is None or not opened.folder.environment.exists():
        return
    config = opened.config
    key = ""
    before = read_object(opened.folder.environment)
    differs = [
        name for name, own in parts.fingerprints.items() if before.get(name) not in (None, own)
    ]
    if differs == ["traces_sha256"]:
        key = trace_query(config, "train").key
    elif differs:
        key = "[[data.mix]]" if config.data.mix else query_of(config, "train").key
    elif other_heldout(opened.folder, config, parts.heldout_sha256):
        key = "[evaluation] source"
    if key:
        raise ConfigurationError(
            f"{key} holds other examples than {opened.folder.path} began with,"
            " which cannot change at resume; restore them, or start a new run."
        )


def other_heldout(
    folder: RunFolder, config: TrainConfig, heldout: Mapping[str, str] | None
) -> bool:
    """True if the run's last session named the same held-out examples, but their content
    differed.
    """
    if not folder.environment.exists() or _named(load_stored(folder.config)) != _named(config):
        return False
    newest = part_of_session(read_object(folder.environment), goes_on=True)
    return newest.get("heldout_sha256") not in (None, heldout)


def _named(config: TrainConfig) -> list[Any]:
    """Return the settings that decide which held-out examples the run reads."""
    tasks = {
        task: (own.get("path"), own.get("max_examples"))
        for task, own in config.evaluation.tasks.items()
    }
    return [
        config.data.source,
        config.data.path,
        config.data.difficulty,
        config.evaluation.source,
        config.evaluation.max_examples,
        tasks,
    ]


def _forget_summary(folder: RunFolder, step: int, notes: list[str]) -> None:
    """Delete the summary unless it counts `step` steps: the resume cuts the others."""
    if not folder.summary.is_file():
        return
    try:
        if read_object(folder.summary).get("steps") == step:
            return
    except RunFailed as error:
        notes.append(f"{str(error).rstrip('.')}; the run's end writes a new one.")
    folder.summary.unlink()


def describe(
    opened: RunStart, parts: RunParts, gate: GateResult | None, log: Callable[[str], None]
) -> None:
    """Complete environment.json, including the data of this session."""
    config, file, backend = opened.config, opened.folder.environment, parts.backend
    environment = read_object(file) | {
        **parts.fingerprints,
        "prompt_date": parts.prompts.data.chat_template_args[DATE_ARGUMENT],
        "engine": asdict(backend.engine.capabilities),
        "backend": asdict(backend.capabilities),
        "loss": loss_notes(config),
    }
    own = part_of_session(environment, goes_on=opened.checkpoint is not None)
    own |= {
        "parity_gate": gate and gate.to_json(),
        "model_sha256": model_fingerprint(placed(config).model),
        "heldout_sha256": parts.heldout_sha256,
    }
    written = parts.prompts.sha256
    if environment.setdefault("prompts_sha256", written) != written:
        log(
            "The chat template writes other prompts than when the run began. From here on this"
            " run is not byte-exact."
        )
    if environment.get("model_sha256") not in (None, own["model_sha256"]):
        log(
            f'[model] model = "{config.model.model}" has other files than when the run began. If'
            " its weights changed, restore them, since the adapter fits the first ones."
        )
    replace_file(file, json.dumps(environment, indent=2) + "\n")


def part_of_session(environment: Json, *, goes_on: bool) -> Json:
    """Return the part of environment.json's content about this session. This is the whole content,
    or its entry among the later ones if the run `goes_on` from a checkpoint.
    """
    later = environment.get("resumed")
    return later[-1] if goes_on and later else environment


def _newest(store: CheckpointStore, folder: RunFolder, passed_over: list[str]) -> Checkpoint | None:
    """Return the checkpoint to resume from; None if the run made none. `passed_over` gets a line
    about each newer one. Raises ConfigurationError if no checkpoint is usable.
    """
    from retrain.records.sound import changed_log

    found = store.newest(
        passed_over.append, lambda checkpoint: changed_log(folder, vars(checkpoint.state()))
    )
    if found is None and (passed_over or folder.trainer_state.exists()):
        nowhere = f"{folder.trainer_state.name} names a checkpoint, but {store.folder} holds none"
        raise NotResumable(folder, " ".join(passed_over).removesuffix(".") or nowhere)
    return found


class NotResumable(ConfigurationError):
    """A run's folder lacks what a resume needs, or holds something else."""

    def __init__(
        self, folder: RunFolder, problem: str, remedy: str = "put back what is missing"
    ) -> None:
        """`problem` and `remedy` are parts of a sentence."""
        self.problem, self.remedy = problem, remedy
        super().__init__(
            f"{folder.path} is not resumable, and retrain left it unchanged, since {problem};"
            f" {remedy}, start over with --overwrite, which deletes what is there, or choose"
            " another [logging] log_dir."
        )
