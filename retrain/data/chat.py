"""From an example to a prompt: the text in the tokenizer's chat template, and its token ids.

retrain never encodes the text again: token ids are the record, text is a view.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.config.data_sections import DATE_ARGUMENT
from retrain.errors import ConfigurationError, first_line
from retrain.types import ChatMessage, Example, Int32Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from retrain.config.schema import Data, TrainConfig

BOXED_INSTRUCTION = r"Reason step by step and put the final answer in \boxed{}."
PLAIN_TEMPLATE = "{prompt}"
DEFAULT_TEMPLATES: dict[str, str] = dict.fromkeys(
    ("math", "gsm8k"), f"{{prompt}}\n\n{BOXED_INSTRUCTION}"
)
"""The prompt template of a data source if [data] prompt_template is unset; other sources have
PLAIN_TEMPLATE."""

_PLAIN_JOIN = "\n\n"
"""Between the messages of a tokenizer without a chat template."""
_MARK = "retrain-marks-this-reply"
"""Stands for a reply, to find what a chat template writes behind it."""

_CHUNK = 2_048  # prompts that the tokenizer encodes in one call, in parallel threads
_OURS = (
    "conversation",
    "messages",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "return_tensors",
    "return_dict",
)
"""Arguments of apply_chat_template that retrain sets itself."""


def render_text(tokenizer: "PreTrainedTokenizerBase", example: Example, data: "Data") -> str:
    """Render the example in the tokenizer's chat template, or as plain text if the tokenizer has
    none.

    A text prompt goes into [data] prompt_template and becomes one user message. In a conversation a
    given template wraps the last user message. The system prompt comes first unless the example has
    its own. A conversation that ends with the assistant's text goes on there. Raises
    ConfigurationError if the chat template refuses the conversation or does not write its tools. It
    also does so for an example of several turns without a chat template.
    """
    messages = messages_of(example, data)
    if tokenizer.chat_template:
        tools = None if isinstance(example.prompt, str) else (example.info or {}).get("tools")
        used = {key for message in messages for key in message} & {"tool_calls"}
        for key in [*used, *["tools"] * bool(tools)]:
            if key not in str(tokenizer.chat_template):
                raise ConfigurationError(
                    f"[data] source: {example.example_id} has {key}, which the chat template of"
                    f" {tokenizer.name_or_path} does not write. Use a model for tools, or"
                    f" prompts without {key}."
                )
        return _apply_chat_template(
            tokenizer,
            messages,
            data.chat_template_args,
            tools or (),
            continues=messages[-1]["role"] == "assistant",
        )
    if any(message["role"] not in ("system", "user") for message in messages):
        raise ConfigurationError(
            f"[data] source: the prompt of {example.example_id} is a conversation, and the"
            f" tokenizer of {tokenizer.name_or_path} has no chat template. Use an"
            " instruction-tuned model, or text prompts."
        )
    return _PLAIN_JOIN.join(message["content"] for message in messages)


def encode_texts(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[Int32Array]:
    """Return the token ids of rendered prompts, [P] each. A chat template has written its special
    tokens itself, so the function adds none. A plain text gets the tokens that the model expects in
    front, such as BOS, unless it starts with them.
    """
    if not texts:
        return []
    opening = _opening_ids(tokenizer)
    bare = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    rows = [ids if ids[: len(opening)] == opening else opening + ids for ids in bare]
    return [np.array(ids, dtype=np.int32) for ids in rows]


def _opening_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the tokens that the model expects before a plain text."""
    if tokenizer.chat_template:
        return []
    letter = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full)):
        if full[start : start + len(letter)] == letter:
            return list(full[:start])
    return []


def count_tokens(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[int]:
    """Return the number of token ids of each rendered prompt."""
    chunks = (texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK))
    encoded = chain.from_iterable(encode_texts(tokenizer, chunk) for chunk in chunks)
    return [len(ids) for ids in encoded]


def token_bounds(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[int]:
    """Return an upper bound of `count_tokens` for each text. A byte-level tokenizer, as most are,
    need not encode for it; another one counts.

    A byte-level token stands for at least one byte of the text in its normal form, and a special
    token for its whole name.
    """
    backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    splitter = repr(backend and backend.pre_tokenizer)
    # Such a tokenizer adds nothing in front, and at most normalizes the text first.
    is_byte_level = "ByteLevel(add_prefix_space=False" in splitter and "Metaspace" not in splitter
    if not is_byte_level or repr(backend.normalizer) not in ("None", "NFC()"):
        return count_tokens(tokenizer, texts)
    added = [] if backend.encode_special_tokens else backend.get_added_tokens_decoder().values()
    names = [token.content for token in added if token.special and not token.single_word]
    names.sort(key=len, reverse=True)  # the tokenizer takes the longest, as the first here
    special = re.compile("|".join(map(re.escape, names)) or "(?!)")
    opening = len(_opening_ids(tokenizer))
    bounds = []
    for text in texts:
        short = special.sub("?", text)
        if backend.normalizer and not short.isascii():
            short = backend.normalizer.normalize_str(short)
        bounds.append(opening + len(short.encode()))
    return bounds


def rendering(config: "TrainConfig") -> "Data":
    """Return the [data] that renders a run's prompts. An environment writes its prompts itself,
    without a template and a system prompt.
    """
    data = config.data
    if not config.environment.provider:
        return data
    return type(data)(prompt_template=PLAIN_TEMPLATE, chat_template_args=data.chat_template_args)


def messages_of(example: Example, data: "Data") -> list[ChatMessage]:
    """Return the conversation for the chat template."""
    if isinstance(example.prompt, str):
        template = data.prompt_template
        if template is None:
            template = DEFAULT_TEMPLATES.get(data.source, PLAIN_TEMPLATE)
        messages = [ChatMessage(role="user", content=fill_template(template, example.prompt))]
    else:
        messages = list(example.prompt)
        if data.prompt_template is not None:
            last = max(
                (i for i, message in enumerate(messages) if message["role"] == "user"), default=None
            )
            if last is not None:
                content = fill_template(data.prompt_template, messages[last]["content"])
                messages[last] = {**messages[last], "content": content}
    if data.system_prompt and not any(message["role"] == "system" for message in messages):
        messages.insert(0, ChatMessage(role="system", content=data.system_prompt))
    return messages


def fill_template(template: str, prompt: str) -> str:
    r"""Fill the places by plain replacement, so that other braces, as in \boxed{}, stay."""
    return template.replace(PLAIN_TEMPLATE, prompt)


def _apply_chat_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[ChatMessage],
    arguments: Mapping[str, Any],
    tools: Sequence[Any] = (),
    *,
    continues: bool = False,
) -> str:
    from jinja2 import TemplateError

    ours = sorted(set(arguments) & set(_OURS))
    if ours:
        raise ConfigurationError(
            f"[data] chat_template_args: retrain itself sets {ours[0]}. Give only variables of"
            " the model's template, such as { enable_thinking = false }."
        )
    try:
        given = {name: value for name, value in arguments.items() if name != DATE_ARGUMENT}
        if tools:
            given["tools"] = list(tools)
        if DATE_ARGUMENT in arguments:
            template = tokenizer.get_chat_template(None, given.get("tools"))
            given["chat_template"] = _dated(template, arguments[DATE_ARGUMENT])
        return str(
            tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **given,
            )
        )
    except (TemplateError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigurationError(
            f"The chat template of {tokenizer.name_or_path} refuses a conversation of the roles"
            f" {roles}: {first_line(error)}. Change [data] system_prompt, chat_template_args or"
            " the prompts."
        ) from error


def _dated(template: str, day: str) -> str:
    """Define a macro that replaces transformers' `strftime_now`, which asks the clock."""
    at = date.fromisoformat(day)
    codes = {f"%{letter}": at.strftime(f"%{letter}") for letter in ascii_letters}
    filled = "".join(f"|replace({code!r}, {text!r})" for code, text in codes.items())
    macro = f"{{% macro {DATE_ARGUMENT}(form) %}}{{{{ form{filled} }}}}{{% endmacro %}}"
    return f"{macro}{{{{ '' }}}}{template}"  # the empty text keeps a line break at its beginning


# ---- conversations that go on --------------------------------------------------------------------


@dataclass(frozen=True)
class Continuation:
    """The tokens in front of a further reply."""

    text: str
    """The whole conversation as the template writes it."""
    token_ids: Int32Array
    """[C] what continues the tokens so far; where it `restarts`, the whole prompt."""
    restarts: bool


class ChatRenderer:
    """Messages as token ids: the renderer opens a conversation, and then continues it without
    encoding anything again.

    After a reply it encodes only the template's next text: the end of the turn, the new messages
    and the head of the next reply. The sampled tokens do not change.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        eos_ids: Sequence[int],
        arguments: Mapping[str, Any],
    ) -> None:
        """`arguments`: `[data] chat_template_args`."""
        self.tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._arguments = arguments

    def text(self, messages: Sequence[ChatMessage], tools: Sequence[Any] = ()) -> str:
        """Render a conversation up to the head of the next reply."""
        if self.tokenizer.chat_template:
            return _apply_chat_template(self.tokenizer, messages, self._arguments, tools)
        return _PLAIN_JOIN.join(message["content"] for message in messages)

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[Any] = ()) -> Continuation:
        """Render the whole conversation as a prompt."""
        text = self.text(messages, tools)
        return Continuation(text, encode_texts(self.tokenizer, [text])[0], restarts=True)

    def continued(
        self,
        text: str,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        last_token: int,
        tools: Sequence[Any] = (),
    ) -> Continuation:
        """Return the tokens and text that follow the reply which ends `history`.

        `text` is the conversation before that reply, as the template wrote it. `last_token` is the
        reply's last token. The continuation restarts if the template changes the earlier
        conversation, for example by dropping old reasoning. White space does not count.
        """
        if self.tokenizer.chat_template:
            marked = [
                ChatMessage(role="user", content="question"),
                ChatMessage(role="assistant", content=_MARK),
                *new,
            ]
            behind = self.text(marked, tools).rpartition(_MARK)[2]
        else:
            behind = _PLAIN_JOIN + self.text(new)
        expected = f"{text}{history[-1]['content']}{behind}"
        whole = self.text([*history, *new], tools)
        if _without_space(whole) != _without_space(expected):
            return self.opening([*history, *new], tools)
        ids: list[int] = self.tokenizer(behind, add_special_tokens=False)["input_ids"]
        if ids and ids[0] == last_token and last_token in self._eos_ids:
            ids = ids[1:]  # the model has ended its turn itself
        return Continuation(whole, np.array(ids, np.int32), restarts=False)


def _without_space(text: str) -> str:
    return "".join(text.split())
