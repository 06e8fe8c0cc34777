"""Score a step's sampled tokens with the teacher of `[algorithm] teacher`. The teacher is the
frozen base, the policy of the start, another adapter, or the policy itself with the answer in its
prompt. It needs no second model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrain.advantages.step import flatten
from retrain.backends.base import Backend
from retrain.config.names import TEACHERS
from retrain.data.chat import encode_texts
from retrain.errors import ConfigurationError, RunFailed
from retrain.model.text import TextModel, base_name
from retrain.system import read_object
from retrain.types import Example, Float64Array, Group, Prompt, Row

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Algorithm


@dataclass(frozen=True)
class Teacher:
    """Scores the tokens of judged groups when a stage of credit assignment reads them."""

    algorithm: "Algorithm"
    text: TextModel
    backend: Backend

    def logprobs(self, groups: Sequence[Group]) -> Float64Array:
        """Return [n] log-probs of the groups' action tokens, in order. Raises RunFailed for a
        prompt that has no place for the answer.
        """
        rows = list(chain.from_iterable(map(self._rows, groups, count())))
        self.backend.engine.sleep()  # Sampling has ended, so the learner may use its memory.
        return flatten(self.backend.reference_logprobs(rows))

    def _rows(self, group: Group, number: int) -> Iterator[Row]:
        for one in group.trajectories:
            nothing = np.zeros(one.num_actions, np.float32)
            for row in Row.of(group.prompt, one, nothing, number):
                if self.algorithm.teacher == "answer" and row.num_actions:
                    yield self._with_answer(row, group.prompt)
                else:
                    yield row

    def _with_answer(self, row: Row, prompt: Prompt) -> Row:
        """Put the answer into the row's prompt, that is, into the tokens before its first action.
        The sampled tokens stay what they are.
        """
        start = row.spans[0][0]
        given = self.text.decode(row.token_ids[:start])
        # The text itself where it is known: decoded tokens need not give it back exactly.
        if np.array_equal(row.token_ids[:start], prompt.token_ids):
            given = prompt.text
        # Otherwise use the last user message, as the chat template writes it.
        question = prompt.text
        for message in prompt.messages:
            if message["role"] == "user":
                question = message["content"].strip()
        place = _place(question, given, prompt)
        if place < 0:
            raise RunFailed(
                '[algorithm] teacher = "answer" needs the question verbatim in the prompt, and'
                f" the prompt of {prompt.prompt_id} lacks it; use another teacher, or another"
                " [data] prompt_template."
            )
        hint = _filled(self.algorithm.teacher_prompt, question, prompt.example.reference)
        whole = f"{given[:place]}{hint}{given[place + len(question) :]}"
        told = encode_texts(self.text.tokenizer, [whole])[0]
        ids = np.concatenate([told, row.token_ids[start:]])
        if len(ids) > self.text.context:
            raise RunFailed(
                f'[algorithm] teacher = "answer" needs {len(ids):,} tokens for prompt'
                f" {prompt.prompt_id}, answer and completion, and the model's context has"
                f" {self.text.context:,}; lower [training] max_tokens, or shorten"
                " teacher_prompt."
            )
        moved = len(told) - start
        spans = tuple((first + moved, stop + moved) for first, stop in row.spans)
        return replace(row, token_ids=ids, spans=spans)


def _place(question: str, given: str, prompt: Prompt) -> int:
    """Return where the question begins in the text before a row's first action; -1 if nowhere."""
    place = prompt.text.rfind(question)
    # In a turn that restarts, an earlier reply may hold the question once more.
    if place >= 0 and given.startswith(prompt.text[: place + len(question)]):
        return place
    return given.rfind(question)


def _filled(template: str, question: str, answer: str) -> str:
    """Fill the places by plain replacement, without looking for places in the inserted texts."""
    return question.join(part.replace("{answer}", answer) for part in template.split("{prompt}"))


_BASE = "base_model_name_or_path"


def check_teacher(config: "TrainConfig") -> None:
    """Raise ConfigurationError for an adapter that cannot teach this run, as far as its settings
    show. Loading the model checks its weights.
    """
    teacher = config.algorithm.teacher
    if not teacher or teacher in TEACHERS:
        return
    where, folder = f'[algorithm] teacher = "{teacher}"', Path(teacher)
    if not (folder / "adapter_config.json").is_file():
        raise ConfigurationError(
            f'{where} holds no adapter_config.json; use "base", "start", "answer" or a PEFT'
            " adapter folder, such as logs/lab/checkpoints/final."
        )
    try:
        settings = read_object(folder / "adapter_config.json")
    except RunFailed as error:
        raise ConfigurationError(f"{where}: {error}") from error
    settings[_BASE] = base_name(str(settings.get(_BASE)))
    rank = config.model.lora_rank
    wanted = {
        _BASE: ("[model] model", base_name(config.model.model)),
        "r": ("[model] lora_rank", rank),
        "lora_alpha": ("[lora] alpha", config.lora.alpha or 2 * rank),
        "use_rslora": ("[lora] use_rslora", config.lora.use_rslora),
    }
    for name, (key, own) in wanted.items():
        if settings.get(name, False) != own:
            raise ConfigurationError(
                f"{where} has {name} = {settings.get(name)}, and {key} gives {own}. The teacher"
                " uses this run's adapter, so it needs the same model, rank and scale; name"
                " another folder, or make the key the same."
            )


def check_answers(config: "TrainConfig", examples: Sequence[Example]) -> None:
    """Raise ConfigurationError if a teacher needs the answer of a problem without one."""
    if config.algorithm.teacher != "answer":
        return
    for example in examples:
        if not example.reference:
            raise ConfigurationError(
                f'[algorithm] teacher = "answer" needs the answer of every problem, and'
                f" {example.example_id} has none; use another teacher, or problems with answers."
            )


def teacher_note(config: "TrainConfig") -> str:
    """Say at the start what a teacher costs; "" without a teacher."""
    teacher = config.algorithm.teacher
    if not teacher:
        return ""
    who = {
        "base": "the frozen base model",
        "start": "the policy before the first step",
        "answer": "the policy with the answer in its prompt",
    }
    return (
        f'[algorithm] teacher = "{teacher}":'
        f" {who.get(teacher, 'the adapter of that folder')} scores a step's tokens where a"
        " stage reads them, in one more forward pass without a second model."
    )
