"""A trained adapter for other programs. The export is a folder for peft and vLLM, or a merged model
for transformers, with its tokenizer and a model card.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from retrain.analysis.runs import stored_run
from retrain.config import TrainConfig, dump_toml, replaced
from retrain.errors import ConfigurationError, EnvironmentFailure, RunFailed, first_line
from retrain.model import hub
from retrain.model.load import load_weights, no_progress_bar
from retrain.model.text import base_name, load_tokenizer, resolve_model
from retrain.records.checkpoint import Checkpoint, CheckpointStore
from retrain.records.checkpoint_place import stored_checkpoints
from retrain.records.disk import is_disk, replacing_folder
from retrain.records.evaluation import Evaluation, read_evaluations
from retrain.records.redact import Redactor, note_secrets
from retrain.records.run_folder import RunFolder
from retrain.records.terminal import counted
from retrain.run.notes import trust_note
from retrain.run.parts import Say
from retrain.squeeze.adapter import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, read_adapter
from retrain.system import toml_value
from retrain.tracking.lines import pass_at_1
from retrain.types import WHOLE_MODEL

SETTINGS_FILE = "retrain.toml"
"""The run's configuration, in the folder of the exported weights."""
_SHOWN = (
    "model.model", "algorithm.algorithm_mode", "algorithm.advantage_mode",
    "algorithm.transform_mode", "training.seed", "training.batch_size", "training.group_size",
    "training.max_tokens", "training.temperature", "training.lr", "model.lora_rank", "data.source",
    "reward.type",
)  # fmt: skip


@dataclass(frozen=True)
class Export:
    folder: Path
    base: str
    """The value of `base_model_name_or_path`: a hub id, or a folder of this machine."""
    is_local: bool
    """True if `base` is a folder."""
    what: str
    """Adapter, Merged model, or Model."""


def export_run(
    run: Path,
    output: Path | None,
    *,
    checkpoint: int | None,
    merged: bool,
    uploads: bool,
    trust: bool,
    log: Say,
) -> Export:
    """Write the adapter of `checkpoint` (the newest by default), the model merged with it, or a
    model trained as a whole, to `output`. The folder `output` must be absent or empty.

    Raises ConfigurationError for a folder in use or without a run or its weights, and for an
    adapter that `uploads` would send without its base. Raises RunFailed for a missing or damaged
    checkpoint, and EnvironmentFailure if the base model is not available. The export never executes
    the run's own Python code, but with `trust` it executes a model's `trust_remote_code`.
    """
    folder, config = RunFolder(run), stored_run(run).config
    what = _kind_of(config, merged)
    output = output or _beside(run, what)
    _check_place(output)
    if not trust:
        _refuse_code(config, folder.config)
    note_secrets(config)
    found = _checkpoint(folder, checkpoint)
    if what != "Model":
        read_adapter(found.folder)  # refuse it before loading anything large
    base = base_name(resolve_model(config.model.model))
    is_local = Path(base).is_dir()
    if uploads and what == "Adapter":
        _refuse_upload(base)
    note = trust_note(config.model)
    if note:
        log(note)
    model = config.model
    tokenizer = load_tokenizer(model.model, model.revision, model.trust_remote_code)
    whole = _whole(config, base, found.folder, merged)
    scores = _held_out(folder, config, found.step)
    texts = _texts(config, "" if is_local else base, found, scores, what)
    with _writing(output), replacing_folder(output.resolve()) as aside, no_progress_bar():
        tokenizer.save_pretrained(aside)
        if whole is not None:
            _write_model(whole, aside)
        else:
            _write_adapter(found.folder, aside, base)
        for name, content in texts.items():
            _write(aside / name, content)
    return Export(output, base, is_local, what)


def _texts(
    config: TrainConfig, base: str, found: Checkpoint, scores: list[Evaluation], what: str
) -> dict[str, str]:
    """Return the settings and the card by their files' names. The function masks them as text too:
    a masked value that the schema refuses stays in the configuration.
    """
    again = Redactor().config(replaced(config, _own_settings(config)))
    texts = {SETTINGS_FILE: dump_toml(again), CARD_FILE: _card(again, base, found, scores, what)}
    return {name: Redactor().text(content) for name, content in texts.items()}


def _kind_of(config: TrainConfig, merged: bool) -> str:
    """Return the kind of the export."""
    if config.model.train == "full":
        return "Model"
    return "Merged model" if merged else "Adapter"


def _refuse_upload(base: str) -> None:
    """Raise ConfigurationError for an adapter whose base stays on this machine."""
    if Path(base).is_dir():
        raise ConfigurationError(
            f"--hub: the adapter's base is a folder of this machine, {base}, which others lack."
            " Add --merged, which uploads a whole model."
        )


def _write_model(model: Any, folder: Path) -> None:
    """Write a whole model. transformers 5 names rope_theta in rope_parameters alone, where MLX-LM
    does not look.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        model.config.rope_theta = rope["rope_theta"]
    model.save_pretrained(folder)
    # A library leaves the weights to their owner alone, and a server often runs as another user.
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)


def _own_settings(config: TrainConfig) -> dict[str, str]:
    """Return the settings that replace the run's own: its folder, and a label in the form of a
    secret, which a mask would make unusable.
    """
    settings = {"logging.log_dir": "logs/reproduced"}
    if Redactor().text(config.logging.label) != config.logging.label:
        settings["logging.label"] = ""
    return settings


def _refuse_code(config: TrainConfig, path: Path) -> None:
    """Raise ConfigurationError if loading the model would run code that came with it."""
    if config.model.trust_remote_code:
        raise ConfigurationError(
            f"{path} names Python code that exporting it would execute: [model] trust_remote_code ="
            f" true (of {config.model.model}). Read the code first, then add --trust."
        )


def _check_place(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigurationError(
            f"{output} is not an empty folder, and export never overwrites; choose another"
            " --output."
        )
    place = output.resolve()
    if place == Path.cwd() or place.is_mount():
        raise ConfigurationError(
            f"{output} is the current folder or a mounted disk, which no export can take the place"
            " of; name a new folder in it by --output."
        )
    if not next(parent for parent in place.parents if parent.exists()).is_dir():
        raise ConfigurationError(f"{output} lies in a file; choose another --output.")
    inside = RunFolder(output).doomed()
    if inside:
        raise ConfigurationError(f"{inside}; name another by --output.")


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_disk(error) and output.parent.exists():
            raise
        # a copy's error names the source, which is intact
        raise EnvironmentFailure(
            f"{output} is not writable ({error.strerror}); free space there, or name"
            " another disk by --output."
        ) from error


def _checkpoint(folder: RunFolder, step: int | None) -> Checkpoint:
    """Return a checkpoint that matches its manifest. Refuse a damaged newest checkpoint: an earlier
    checkpoint has other weights, which the user requests by --checkpoint.
    """
    store = CheckpointStore(stored_checkpoints(folder))
    steps = store.steps()
    if not steps:
        raise RunFailed(
            f"{folder.path} has no checkpoint yet; wait for [training] save_every steps, or"
            f" continue the run by `{folder.resume_command}`."
        )
    return store.at(steps[-1] if step is None else step)


def _merged(config: TrainConfig, base: str, adapter: Path) -> Any:
    """Return the transformers model with s B A added to its weights, in the dtype of the base's
    files.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    # Take the published base: the merge would round weights in 4 bits once more.
    plain = replaced(config, {"model.load_in_4bit": False}).model
    model = load_weights(plain, base, torch.device("cpu"), "auto")
    # Peft reads an attribute that transformers deprecates.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            wrapped: Any = PeftModel.from_pretrained(model, str(adapter))
        except (ImportError, RuntimeError, ValueError) as error:
            raise _does_not_fit(adapter, base, first_line(error).rstrip(".:")) from error
    with safe_open(adapter / WEIGHTS_FILE, "pt") as weights:
        stored = set(weights.keys())
    # Peft passes over stored weights for which the model has no place.
    left_out = stored - get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys()
    if left_out:
        raise _does_not_fit(adapter, base, f"no place for {min(left_out)}")
    return wrapped.merge_and_unload(safe_merge=True)


def _beside(run: Path, what: str) -> Path:
    """Return a folder next to a run. A run given as `.` gets its name only by resolving it."""
    place = run.resolve()
    return place.parent / f"{place.name}-{what.split()[0].lower()}"


def _whole(config: TrainConfig, base: str, folder: Path, merged: bool) -> Any:
    """Return the transformers model of a checkpoint; None for the export of its adapter."""
    if config.model.train == "full":
        return _trained(config, base, folder)
    return _merged(config, base, folder) if merged else None


def _trained(config: TrainConfig, base: str, folder: Path) -> Any:
    """Return the transformers model with the weights of a checkpoint, in the dtype of the base's
    files.
    """
    from safetensors.torch import load_file

    model = load_weights(config.model, base, torch.device("cpu"), "auto")
    weights, own = load_file(folder / WHOLE_MODEL), dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if name not in own or own[name].shape != weight.shape:
                raise _does_not_fit(folder, base, f"no place for {name}")
            own[name].copy_(weight)
    return model


def _does_not_fit(adapter: Path, base: str, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"{adapter} does not fit its base model {base} ({problem}); put back the model and the"
        f" {CONFIG_FILE} of the run."
    )


def _write_adapter(adapter: Path, output: Path, base: str) -> None:
    """Copy an adapter, with `base` as the name of its base model."""
    shutil.copyfile(adapter / WEIGHTS_FILE, output / WEIGHTS_FILE)
    settings = read_adapter(adapter).settings | {"base_model_name_or_path": base}
    _write(output / CONFIG_FILE, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _held_out(folder: RunFolder, config: TrainConfig, step: int) -> list[Evaluation]:
    """Return the run's evaluations of the untrained model and of the exported weights, as far as it
    made them.
    """
    found = read_evaluations(folder.evaluation, config.evaluation.k)
    return [each for each in found if each.step in (0, step)]


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


# -- the model card --------------------------------------------------------------------------------


def _card(
    config: TrainConfig,
    hub_base: str,
    checkpoint: Checkpoint,
    held_out: list[Evaluation],
    what: str,
) -> str:
    """Return the README.md of the export. `hub_base` is "" for a base that is a folder, which no
    card may name.
    """
    name = hub_base or Path(config.model.model).name
    library = "peft" if what == "Adapter" else "transformers"
    lora = "" if what == "Model" else "lora, "
    front = ["---", f"library_name: {library}", "pipeline_tag: text-generation"]
    front.append(f"tags: [{lora}reinforcement-learning, retrain]")
    kinds = {"Adapter": "LoRA adapter", "Model": "all weights trained"}
    if hub_base:
        front.insert(1, f"base_model: {json.dumps(hub_base)}")
    scores = [
        f"| {each.step} | {pass_at_1(each).removeprefix('pass@1=')} | {len(each.problems)} |"
        for each in held_out
    ]
    table = ["| steps | pass@1 with its 95% interval | problems |", "|---|---|---|", *scores]
    values = {path: config.value(path) for path in _SHOWN} | {"model.model": name}
    if Path(config.data.source).is_absolute():
        values["data.source"] = Path(config.data.source).name
    moved = config.schedule.points
    shown = [
        f"| `{path}` | `{toml_value(value)}`{', moved by [schedule]' if path in moved else ''} |"
        for path, value in values.items()
    ]
    steps = counted(checkpoint.step, "step")
    return "\n".join(
        [
            *front,
            f"---\n\n# {name}: {kinds.get(what, 'merged model')}\n",
            f"Trained with reinforcement learning by retrain, for {steps}.\n",
            "## Held-out problems\n",
            *(table if scores else ["The run did not evaluate these weights."]),
            "\n## Settings\n\n| key | value |\n|---|---|",
            *shown,
            f"\n{SETTINGS_FILE} holds all of them, with secrets masked.\n",
            f"Hash of the configuration: `{checkpoint.state().config_hash}`.\n",
            f"## Train it again\n\n```bash\nretrain {SETTINGS_FILE}\n```\n",
        ]
    )


# -- the hub ---------------------------------------------------------------------------------------


def check_hub(name: str) -> None:
    """Raise EnvironmentFailure if an upload is impossible: no token, or no network."""
    from huggingface_hub import get_token

    if not get_token():
        raise EnvironmentFailure(
            f"--hub {name} needs a token of the Hugging Face hub: set HF_TOKEN, or run `hf auth"
            " login`."
        )
    problem = hub.why_unreachable()
    if problem:
        raise EnvironmentFailure(
            f"--hub {name}: {problem}. Export without --hub, and upload the folder by `hf"
            f" upload {name} FOLDER` where there is a network."
        )


def push(exported: Export, name: str) -> str:
    """Upload the folder to a repository of the hub, which is private if it is new. Return its
    address.
    """
    import httpx
    from huggingface_hub import HfApi

    try:
        address = HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=exported.folder)
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise EnvironmentFailure(
            f"--hub {name}: the hub refused the upload ({first_line(error)}); {exported.folder} is"
            f" complete, and `hf upload {name} {exported.folder}` tries again."
        ) from error
    return str(address)
