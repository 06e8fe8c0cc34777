r"""The model's text side: its tokenizer, its vocabulary, the tokens that end a turn, and prompts as the model wants them.

A prompt is rendered and encoded here once. Nothing is ever re-encoded afterwards: token ids are the record, text is a view.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.model import hub
from retrain.records.disk import expanded
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.types import ChatMessage, Example, Int32Array
from retrain.model.vocabulary import VocabularyTable

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

    from retrain.config.schema import Data, Model

__all__ = [
    "TextModel",
    "VocabularyTable",
    "context_length",
    "encode_texts",
    "eos_token_ids",
    "load_model_config",
    "load_text_model",
    "load_tokenizer",
    "render_prompt",
    "render_text",
    "resolve_model",
]

BOXED_INSTRUCTION = r"Reason step by step and put the final answer in \boxed{}."
PLAIN_TEMPLATE = "{prompt}"
DEFAULT_TEMPLATES: dict[str, str] = dict.fromkeys(("math", "gsm8k"), f"{{prompt}}\n\n{BOXED_INSTRUCTION}")
"""The prompt template of a data source where [data] prompt_template is unset; others are plain."""


_OURS = ("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "return_tensors", "return_dict")
"""Arguments of apply_chat_template that retrain sets itself."""
_PROBE = "retrain-marks-this-turn"  # stands for an assistant's turn, to find what a chat template writes behind it


# ---- loading -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextModel:
    """Everything about a model that needs no weights."""

    path: str
    """Folder or hub id that transformers loads."""
    tokenizer: "PreTrainedTokenizerBase"
    vocabulary: VocabularyTable
    eos_ids: tuple[int, ...]
    context: int
    """Positions of prompt and completion together; 0 if the model names no limit."""


def resolve_model(name: str) -> str:
    """The folder or hub id behind `[model] model`: "lab" is the packaged model, a folder stays, anything else is a hub id."""
    if name == "lab":
        from retrain.data.lab import MODEL_PATH

        return str(MODEL_PATH)
    folder = expanded(name, "[model] model")
    return str(folder) if folder.exists() else name


def load_text_model(model: "Model") -> TextModel:
    """Tokenizer, vocabulary, end-of-turn tokens and context length of `[model] model`.

    Raises EnvironmentFailure where there is no such folder and the hub does not have or give it.
    """
    path = resolve_model(model.model)
    tokenizer = load_tokenizer(model.model, model.revision, model.trust_remote_code)
    config = load_model_config(model.model, model.revision, model.trust_remote_code)
    generation = _load_generation_config(path, model.revision)
    return TextModel(
        path=path,
        tokenizer=tokenizer,
        vocabulary=VocabularyTable(tokenizer, int(_language_model(config).get("vocab_size") or 0)),
        eos_ids=eos_token_ids(tokenizer, config, generation),
        context=context_length(config),
    )


def load_tokenizer(name: str, revision: str = "", trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder, a hub id or "lab". Raises EnvironmentFailure within seconds if it cannot be had."""
    from transformers import AutoTokenizer

    return _from_pretrained(AutoTokenizer.from_pretrained, "tokenizer", name, revision, trust_remote_code)


def load_model_config(name: str, revision: str = "", trust_remote_code: bool = False) -> "PretrainedConfig":
    """config.json of a folder, a hub id or "lab". Raises EnvironmentFailure within seconds if it cannot be had."""
    from transformers import AutoConfig

    return _from_pretrained(AutoConfig.from_pretrained, "configuration", name, revision, trust_remote_code)


def _from_pretrained(load: Callable[..., Any], part: str, name: str, revision: str, trust_remote_code: bool) -> Any:
    path = resolve_model(name)
    is_local = Path(path).is_dir()
    online = is_local or (_is_hub_id(path) and hub.reachable())
    if not is_local and not _is_hub_id(path):
        raise EnvironmentFailure(f'[model] model = "{name}" is no folder on this machine; name one, a hub id such as owner/name, or "lab".')
    try:
        return load(path, revision=revision or None, trust_remote_code=trust_remote_code, local_files_only=is_local or not online)
    except (OSError, ValueError, KeyError) as error:  # transformers raises all three for missing and broken files
        if online:
            where = f"the folder {path}" if is_local else "the Hugging Face hub"
            raise EnvironmentFailure(
                f'The {part} of [model] model = "{name}" could not be loaded from {where}: {_first_line(error)}'
            ) from error
        raise EnvironmentFailure(
            f'[model] model = "{name}" is no folder on this machine, not in the hub\'s cache, and {hub.why_unreachable()}; {_ALLOWED}.'
        ) from error


_ALLOWED = 'offline, give a local model folder or model = "lab", the model that comes with retrain'


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) is not None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def _load_generation_config(path: str, revision: str) -> "GenerationConfig | None":
    """generation_config.json, which many models do without."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(path, revision=revision or None, local_files_only=Path(path).is_dir())
    except OSError:
        return None


def _language_model(config: "PretrainedConfig") -> dict[str, Any]:
    """A model of several modalities keeps its language model's numbers apart."""
    settings: dict[str, Any] = config.get_text_config().to_dict()
    return settings


def context_length(config: "PretrainedConfig") -> int:
    """max_position_embeddings: the positions that prompt and completion share; 0 if the model names no limit."""
    return int(_language_model(config).get("max_position_embeddings") or 0)


# ---- the tokens that end a completion -----------------------------------------------------------------------------------------------


def eos_token_ids(
    tokenizer: "PreTrainedTokenizerBase", config: "PretrainedConfig | None" = None, generation: "GenerationConfig | None" = None
) -> tuple[int, ...]:
    """Every token that ends a completion, sorted: the tokenizer's EOS, those of config.json and generation_config.json, and the
    special token that the chat template writes behind an assistant's turn (a base model's EOS may be another one).

    Raises ConfigurationError if there is none: completions would never end.
    """
    named = [_language_model(config).get("eos_token_id") if config else None, generation.eos_token_id if generation else None]
    found = {tokenizer.eos_token_id, _end_of_turn(tokenizer)}
    for value in named:
        found |= set(value) if isinstance(value, list) else {value}
    ids = tuple(sorted(int(token) for token in found if token is not None))
    if not ids:
        raise ConfigurationError(
            f"[model] model: neither the tokenizer nor generation_config.json of {tokenizer.name_or_path} names an end-of-sequence token, "
            "so no completion could end; set eos_token in its tokenizer_config.json."
        )
    return ids


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    if not tokenizer.chat_template:
        return None
    from jinja2 import TemplateError

    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except TemplateError:  # a template that refuses this conversation tells nothing
        return None
    _, found, rest = str(text).rpartition(_PROBE)
    special = set(tokenizer.all_special_ids) | {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    after = tokenizer(rest.lstrip(), add_special_tokens=False)["input_ids"] if found else []
    return int(after[0]) if after and after[0] in special else None


# ---- prompts ------------------------------------------------------------------------------------------------------------------------


def render_prompt(tokenizer: "PreTrainedTokenizerBase", example: Example, data: "Data") -> tuple[str, Int32Array]:
    """The prompt as text and as token ids [P], ending where the assistant's turn begins."""
    text = render_text(tokenizer, example, data)
    return text, encode_texts(tokenizer, [text])[0]


def render_text(tokenizer: "PreTrainedTokenizerBase", example: Example, data: "Data") -> str:
    """The example in the tokenizer's chat template, or plain where it has none.

    A text prompt is put into [data] prompt_template and becomes one user message; in a chat prompt the template goes around the last user
    message, if it was set. The system prompt opens the conversation unless the example brings its own.
    Raises ConfigurationError if the chat template refuses the conversation, or if there is none and the example is one.
    """
    messages = _messages(example, data)
    if tokenizer.chat_template:
        return _apply_chat_template(tokenizer, messages, data)
    if any(message["role"] not in ("system", "user") for message in messages):
        raise ConfigurationError(
            f"[data] source: the prompt of {example.example_id} is a conversation, and the tokenizer of {tokenizer.name_or_path} has no "
            "chat template; use an instruction-tuned model, or prompts that are text."
        )
    return "\n\n".join(message["content"] for message in messages)


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[Int32Array]:
    """Token ids of rendered prompts, [P] each. A chat template writes its special tokens itself, so none is added twice; a plain
    text gets those that the model expects in front (BOS), and none behind."""
    if not texts:
        return []
    bare = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    opening = [] if tokenizer.chat_template else _opening_tokens(tokenizer)
    rows = [ids if ids[: len(opening)] == opening else opening + ids for ids in bare]
    return [np.array(ids, dtype=np.int32) for ids in rows]


def _opening_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """What the tokenizer puts in front of a text, such as BOS."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    starts = [start for start in range(len(full)) if full[start : start + len(bare)] == bare]
    return list(full[: starts[0]]) if starts else []


def _messages(example: Example, data: "Data") -> list[ChatMessage]:
    if isinstance(example.prompt, str):
        template = data.prompt_template if data.prompt_template is not None else DEFAULT_TEMPLATES.get(data.source, PLAIN_TEMPLATE)
        messages = [ChatMessage(role="user", content=fill_template(template, example.prompt))]
    else:
        messages = list(example.prompt)
        if data.prompt_template is not None:
            last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
            if last is not None:
                messages[last] = ChatMessage(role="user", content=fill_template(data.prompt_template, messages[last]["content"]))
    if data.system_prompt and not any(message["role"] == "system" for message in messages):
        messages.insert(0, ChatMessage(role="system", content=data.system_prompt))
    return messages


def fill_template(template: str, prompt: str) -> str:
    """Plain replacement: other braces, such as those of \\boxed{}, stay."""
    return template.replace(PLAIN_TEMPLATE, prompt)


def _apply_chat_template(tokenizer: "PreTrainedTokenizerBase", messages: list[ChatMessage], data: "Data") -> str:
    from jinja2 import TemplateError

    if ours := sorted(set(data.chat_template_args) & set(_OURS)):
        raise ConfigurationError(
            f"[data] chat_template_args: {ours[0]} is set by retrain itself; give only variables of the model's template, such as "
            "{ enable_thinking = false }."
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **data.chat_template_args))
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigurationError(
            f"The chat template of {tokenizer.name_or_path} refuses a conversation of the roles {roles}: {_first_line(error)}; change "
            "[data] system_prompt, chat_template_args or the prompts."
        ) from error
