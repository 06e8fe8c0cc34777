"""A trained adapter for other programs. The export is a folder for peft and vLLM, or a merged model
for transformers, with its tokenizer and a model card.
"""

import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from retrain.analysis.runs import stored_run
from retrain.config import TrainConfig, dump_toml, replaced
from retrain.config.mixture import task_of
from retrain.errors import ConfigurationError, EnvironmentFailure, RunFailed, first_line
from retrain.model import hub
from retrain.model.load import load_weights, no_progress_bar
from retrain.model.text import base_name, load_tokenizer, placed, resolve_model
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
from retrain.system import read_object, toml_value
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

_KINDS = {
    "Adapter": ("LoRA adapter", "peft", "lora, "),
    "Merged model": ("merged model", "transformers", "lora, "),
    "Model": ("all weights trained", "transformers", ""),
}
"""`Export.what` -> words, library and first tag of the card."""


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
    adapter that `uploads` would send without its base. Raises RunFailed for damaged records
    and for a missing or damaged checkpoint. Raises EnvironmentFailure if the base model is not
    available. The export never executes the run's own Python code, but with `trust` it executes a
    model's `trust_remote_code`.
    """
    source = stored_run(run).check()
    folder, config = source.folder, source.config
    model, full, place = placed(config).model, config.model.train == "full", run.resolve()
    what = "Model" if full else "Merged model" if merged else "Adapter"
    output = output or place.parent / f"{place.name}-{what.split()[0].lower()}"
    _check_place(output)
    if model.trust_remote_code and not trust:
        raise ConfigurationError(
            f"{folder.config} names Python code that exporting it would execute: [model]"
            f" trust_remote_code = true (of {model.model}). Read the code first, then add --trust."
        )
    note_secrets(config)
    found = _checkpoint(folder, checkpoint)
    if not full:
        read_adapter(found.folder)  # refuse it before loading anything large
    base = base_name(resolve_model(model.model))
    is_local = Path(base).is_dir()
    if uploads and what == "Adapter" and is_local:
        raise ConfigurationError(
            f"--hub: the adapter's base is a folder of this machine, {base}, which others lack."
            " Add --merged, which uploads a whole model."
        )
    if note := trust_note(model):
        log(note)
    tokenizer = load_tokenizer(model.model, model.revision, model.trust_remote_code)
    whole = None
    if what != "Adapter":
        whole = (_trained if full else _merged)(config, base, found.folder)
    texts = _texts(folder, config, "" if is_local else base, found, what)
    _write(output, tokenizer, whole, found.folder, base, texts)
    return Export(output, base, is_local, what)


def _texts(
    folder: RunFolder, config: TrainConfig, base: str, found: Checkpoint, what: str
) -> dict[str, str]:
    """Return the settings and the card by their files' names. The function masks them as text too:
    a masked value that the schema refuses stays in the configuration.
    """
    evaluated = read_evaluations(folder.evaluation, config.evaluation.k)
    scores = [each for each in evaluated if each.step in (0, found.step)]
    own = {"logging.log_dir": "logs/reproduced", "resume.from": ""}
    if Redactor().text(config.logging.label) != config.logging.label:
        own["logging.label"] = ""  # a mask would make it unusable
    again = Redactor().config(replaced(config, own))
    texts = {SETTINGS_FILE: dump_toml(again), CARD_FILE: _card(again, base, found, scores, what)}
    return {name: Redactor().text(content) for name, content in texts.items()}


def _write(
    output: Path, tokenizer: Any, whole: Any, adapter: Path, base: str, texts: dict[str, str]
) -> None:
    """Write the export as a whole: `whole`, or without it the adapter with its base's name."""
    try:
        with replacing_folder(output.resolve()) as aside, no_progress_bar():
            tokenizer.save_pretrained(aside)
            if whole is None:
                shutil.copyfile(adapter / WEIGHTS_FILE, aside / WEIGHTS_FILE)
                settings = read_object(adapter / CONFIG_FILE) | {"base_model_name_or_path": base}
                texts[CONFIG_FILE] = json.dumps(settings, indent=2, sort_keys=True) + "\n"
            else:
                # transformers 5 names rope_theta in rope_parameters alone, and MLX-LM does not look
                # there.
                rope = getattr(whole.config, "rope_parameters", None) or {}
                if "rope_theta" in rope:
                    whole.config.rope_theta = rope["rope_theta"]
                whole.save_pretrained(aside)
                # A library leaves the weights to their owner alone, and a server often runs as
                # another user.
                mode = (aside / "config.json").stat().st_mode
                for weights in aside.glob("*.safetensors"):
                    weights.chmod(mode)
            for name, content in texts.items():
                (aside / name).write_text(content, encoding="utf-8")
    except OSError as error:
        if not is_disk(error) and output.parent.exists():
            raise
        # a copy's error names the source, which is intact
        raise EnvironmentFailure(
            f"{output} is not writable ({error.strerror}); free space there, or name"
            " another disk by --output."
        ) from error


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
    kind, library, lora = _KINDS[what]
    scores = [
        f"| {each.step} | {pass_at_1(each).removeprefix('pass@1=')} | {len(each.problems)} |"
        for each in held_out
    ]
    table = ["| steps | pass@1 with its 95% interval | problems |", "|---|---|---|", *scores]
    values = {path: config.value(path) for path in _SHOWN} | {"model.model": name}
    if config.data.mix:
        del values["data.source"], values["reward.type"]
        values["data.mix"] = [task_of(table) for table in config.data.mix]
    elif Path(config.data.source).is_absolute():
        values["data.source"] = Path(config.data.source).name
    moved = config.schedule.points
    shown = [
        f"| `{path}` | `{toml_value(value)}`{', moved by [schedule]' if path in moved else ''} |"
        for path, value in values.items()
    ]
    steps = counted(checkpoint.step, "step")
    stage = " after a supervised stage" * config.sft.is_on
    return "\n".join(
        [
            "---",
            *([f"base_model: {json.dumps(hub_base)}"] if hub_base else []),
            f"library_name: {library}\npipeline_tag: text-generation",
            f"tags: [{lora}reinforcement-learning, retrain]\n---\n\n# {name}: {kind}\n",
            f"Trained by retrain, for {steps} of reinforcement learning{stage}.\n",
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
