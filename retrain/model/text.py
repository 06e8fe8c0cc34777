"""The part of a model that needs no weights: its tokenizer, its vocabulary, its context length and
the tokens that end a turn.
"""

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.config.load import replaced
from retrain.config.names import TEACHERS
from retrain.errors import ConfigurationError, EnvironmentFailure, first_line
from retrain.model import hub
from retrain.model.budget import context_length
from retrain.model.vocabulary import ANSWER, VocabularyTable, decode, rendered_turns
from retrain.types import Int32Array

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

    from retrain.config import TrainConfig
    from retrain.config.schema import Model

__all__ = [
    "TextModel",
    "VocabularyTable",
    "base_name",
    "eos_token_ids",
    "load_model_config",
    "load_text_model",
    "load_tokenizer",
    "model_files",
    "placed",
    "resolve_model",
]

LAB_MODEL = Path(__file__).resolve().parent.parent / "assets" / "lab"
"""The packaged model: what `model = "lab"` resolves to."""
LAB_MODELS = {"lab": LAB_MODEL, "lab2": LAB_MODEL.with_name("lab2")}
"""The packaged models by name."""


# ---- loading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextModel:
    """Everything about a model that needs no weights."""

    path: str
    """Folder or hub id that transformers loads."""
    tokenizer: "PreTrainedTokenizerBase"
    vocabulary: VocabularyTable
    eos_ids: tuple[int, ...]
    context: int
    """Positions of prompt and completion together; NO_LIMIT if the model names none."""

    def decode(self, token_ids: Int32Array) -> str:
        """Return the text of token ids with the names of special tokens."""
        return decode(self.tokenizer, token_ids.tolist())


def resolve_model(name: str) -> str:
    """Return the folder or hub id behind `[model] model`. "lab" and "lab2" name models of the
    package, a folder stays, anything else is a hub id.
    """
    folder = LAB_MODELS.get(name, Path(name))
    return str(folder) if folder.is_dir() else name


def placed(config: "TrainConfig") -> "TrainConfig":
    """Return `config` with its model, first adapter and teacher where `find` finds them. Any other
    name keeps its text, and so does a path in the current folder.
    """
    changes = {}
    for key in ("model.model", "lora.init_from", "algorithm.teacher"):
        name = str(config.value(key))
        if name and name not in (*LAB_MODELS, *TEACHERS):
            found = config.find(name, _holds_model)
            if found.resolve() != Path(name).resolve():
                changes[key] = str(found)
    return replaced(config, changes)


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def base_name(name: str) -> str:
    """Return the name under which an adapter finds its base from any folder. For a folder it is the
    absolute path; a hub id or a packaged model keeps its name.
    """
    is_local = name not in LAB_MODELS and Path(name).is_dir()
    return str(Path(name).resolve()) if is_local else name


def model_files(name: str) -> list[tuple[str, int, int]]:
    """Return name, time of change and bytes of each file in a model's folder; [] for a hub id."""
    folder = Path(resolve_model(name))
    if not folder.is_dir():
        return []
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return [(file, stat.st_mtime_ns, stat.st_size) for file, stat in stats]


_BLOCK, _BLOCKS = 1 << 16, 64
"""Bytes and number of the blocks of a large file that its model's fingerprint reads."""


def model_fingerprint(model: "Model") -> str | None:
    """Return the sha256 of a model's folder, with samples of blocks over the whole length of a
    large file. For a hub id, return its commit, or None if it is unknown.
    """
    folder = Path(resolve_model(model.model))
    if not folder.is_dir():
        config = load_model_config(model.model, model.revision, model.trust_remote_code)
        return getattr(config, "_commit_hash", None)
    seen = hashlib.sha256()
    for name, _, size in model_files(model.model):
        seen.update(f"{name} {size}\n".encode())
        with (folder / name).open("rb") as file:
            for start in range(0, size, max(_BLOCK, size // _BLOCKS)):
                file.seek(start)
                seen.update(file.read(_BLOCK))
    return seen.hexdigest()


def load_text_model(model: "Model") -> TextModel:
    """Load tokenizer, vocabulary, end-of-turn tokens and context length of `[model] model`.

    Raises EnvironmentFailure if neither a folder nor the hub provides the model.
    """
    # transformers advises to install torch, and its tokenizers do without.
    if find_spec("torch") is None:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    path = resolve_model(model.model)
    tokenizer = load_tokenizer(model.model, model.revision, model.trust_remote_code)
    config = load_model_config(model.model, model.revision, model.trust_remote_code)
    from transformers import GenerationConfig  # after the variable above

    try:
        local = Path(path).is_dir()
        generation = GenerationConfig.from_pretrained(
            path, revision=model.revision or None, local_files_only=local
        )
    except OSError:  # many models do without generation_config.json
        generation = None
    eos_ids = eos_token_ids(tokenizer, config, generation)
    size = int(_of_text(config, "vocab_size") or 0)
    return TextModel(
        path=path,
        tokenizer=tokenizer,
        vocabulary=VocabularyTable(tokenizer, size, eos_ids),
        eos_ids=eos_ids,
        context=context_length(config),
    )


def load_tokenizer(
    name: str, revision: str = "", trust_remote_code: bool = False
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder, a hub id or "lab". Raises EnvironmentFailure within seconds
    if it cannot be had.
    """
    from transformers import AutoTokenizer

    tokenizer = _from_pretrained(
        AutoTokenizer.from_pretrained, "tokenizer", name, revision, trust_remote_code
    )
    # For some families transformers makes an empty tokenizer of a folder that holds none.
    if len(tokenizer) == len(tokenizer.added_tokens_decoder):
        raise EnvironmentFailure(
            f'[model] model = "{name}" holds no tokenizer; name a whole model, such as a `retrain'
            " export` of the run."
        )
    return tokenizer


def load_model_config(
    name: str, revision: str = "", trust_remote_code: bool = False
) -> "PretrainedConfig":
    """Load config.json of a folder, a hub id or "lab". Raises EnvironmentFailure within seconds if
    it cannot be had.
    """
    from transformers import AutoConfig

    return _from_pretrained(
        AutoConfig.from_pretrained, "configuration", name, revision, trust_remote_code
    )


def _from_pretrained(
    load: Callable[..., Any], part: str, name: str, revision: str, trust_remote_code: bool
) -> Any:
    path = resolve_model(name)
    is_local = Path(path).is_dir()
    if not is_local and not _HUB_ID.fullmatch(path):
        raise EnvironmentFailure(
            f'[model] model = "{name}" is not a folder on this machine; name one, a hub id such as'
            ' owner/name, or "lab".'
        )
    online = is_local or hub.reachable()
    try:
        return load(
            path,
            revision=revision or None,
            trust_remote_code=trust_remote_code,
            local_files_only=is_local or not online,
        )
    # transformers raises all three for missing and broken files.
    except (OSError, ValueError, KeyError) as error:
        if online:
            where = f"the folder {path}" if is_local else "the Hugging Face hub"
            raise EnvironmentFailure(
                f'The {part} of [model] model = "{name}" did not load from {where}:'
                f" {first_line(error)}"
            ) from error
        raise EnvironmentFailure(
            f'[model] model = "{name}" is not a folder on this machine, not in the hub\'s cache,'
            f" and {hub.why_unreachable()}; {_ALLOWED}."
        ) from error


_ALLOWED = 'offline, give a local model folder or model = "lab", the model that comes with retrain'


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _of_text(config: "PretrainedConfig | None", name: str) -> Any:
    """Return a setting of the language model, which a model of several modalities keeps apart."""
    if config is None:
        return None
    return config.get_text_config().to_dict().get(name)


# ---- the tokens that end a completion ------------------------------------------------------------


def eos_token_ids(
    tokenizer: "PreTrainedTokenizerBase",
    config: "PretrainedConfig | None" = None,
    generation: "GenerationConfig | None" = None,
) -> tuple[int, ...]:
    """Return every token that ends a completion, sorted: each EOS of the tokenizer, config.json and
    generation_config.json. They include the special token that the chat template writes after an
    assistant's turn (a base model's EOS may be another token).

    Raises ConfigurationError if there is none: completions would never end.
    """
    found = {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    for value in (_of_text(config, "eos_token_id"), getattr(generation, "eos_token_id", None)):
        found |= set(value) if isinstance(value, list) else {value}
    ids = tuple(sorted(int(token) for token in found if token is not None))
    if not ids:
        raise ConfigurationError(
            "[model] model: neither the tokenizer nor generation_config.json of"
            f" {tokenizer.name_or_path} names an end-of-sequence token, so no completion could"
            " end. Set eos_token in its tokenizer_config.json."
        )
    return ids


def end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the special token that the chat template writes after an assistant's turn; None if it
    writes none.
    """
    _, found, rest = rendered_turns(tokenizer).rpartition(ANSWER)
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    after = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"] if found else []
    if after and after[0] in special:
        return int(after[0])
    return None
