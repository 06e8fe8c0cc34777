"""From an example to a prompt: the text in the tokenizer's chat template, and its token ids.

Nothing is re-encoded afterwards: token ids are the record, text is a view.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from retrain.errors import ConfigurationError, first_line
from retrain.types import ChatMessage, Example, Int32Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from retrain.config.schema import Data

BOXED_INSTRUCTION = r"Reason step by step and put the final answer in \boxed{}."
PLAIN_TEMPLATE = "{prompt}"
DEFAULT_TEMPLATES: dict[str, str] = dict.fromkeys(("math", "gsm8k"), f"{{prompt}}\n\n{BOXED_INSTRUCTION}")
"""The prompt template of a data source if [data] prompt_template is unset; other sources have PLAIN_TEMPLATE."""

_OURS = ("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "return_tensors", "return_dict")
"""Arguments of apply_chat_template that retrain sets itself."""


def render_text(tokenizer: "PreTrainedTokenizerBase", example: Example, data: "Data") -> str:
    """The example in the tokenizer's chat template, or as plain text if the tokenizer has none.

    A text prompt is put into [data] prompt_template and becomes one user message. In a conversation the template, if it is set, wraps
    the last user message. The system prompt comes first unless the example has its own.
    Raises ConfigurationError if the chat template refuses the conversation, or if there is none and the example has several turns.
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
    """Token ids of rendered prompts, [P] each. A chat template has written its special tokens itself, so none is added; a plain text
    gets the tokens that the model expects in front, such as BOS, unless it starts with them.
    """
    if not texts:
        return []
    bare = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    opening = [] if tokenizer.chat_template else _opening_tokens(tokenizer)
    rows = [ids if ids[: len(opening)] == opening else opening + ids for ids in bare]
    return [np.array(ids, dtype=np.int32) for ids in rows]


def _opening_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokens that the tokenizer puts in front of a text, such as BOS."""
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
    r"""Plain replacement, so that other braces, as in \boxed{}, stay."""
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
            f"The chat template of {tokenizer.name_or_path} refuses a conversation of the roles {roles}: {first_line(error)}; change "
            "[data] system_prompt, chat_template_args or the prompts."
        ) from error
