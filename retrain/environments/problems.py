"""The problems of an environment as examples of a run."""

from dataclasses import replace
from typing import TYPE_CHECKING

from retrain.data.chat import PLAIN_TEMPLATE
from retrain.data.load import NoHeldOutSplit, subset
from retrain.data.sources import ReadResult
from retrain.environments.base import Environment, Split, is_conversation
from retrain.environments.loading import environment_code
from retrain.errors import ConfigurationError
from retrain.types import Example

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Environment as Settings


def environment_name(settings: "Settings") -> str:
    """Return the environment's name in sentences: verifiers "my-env"."""
    return f'{settings.provider} "{settings.id}"' if settings.id else f'"{settings.provider}"'


def load_problems(environment: Environment, config: "TrainConfig", split: Split) -> ReadResult:
    """Return the problems of one split, the training ones cut to `[training] max_examples`.

    Raises ConfigurationError if none is left, NoHeldOutSplit if the environment has no evaluation set.
    """
    name = environment_name(config.environment)
    with environment_code(f"[environment] {name}: reading its {split} set", config.environment.timeout_s):
        examples = list(environment.examples(split))
    if not examples and split == "evaluation":
        raise NoHeldOutSplit(
            f"[environment] {name} has no evaluation set, and an evaluation was asked for: switch off every, at_start and at_end in "
            "[evaluation], or choose an environment that has one."
        )
    if not examples:
        raise ConfigurationError(
            f"[environment] {name} has no training set, so it can evaluate and not train: choose another environment, or look among its "
            "args for one that selects a training split."
        )
    for example in examples:
        if not (isinstance(example, Example) and (isinstance(example.prompt, str) or is_conversation(example.prompt))):
            shown = " ".join(repr(example).split())[:80]
            raise ConfigurationError(
                f"[environment] {name}: its {split} set holds {shown}, and must hold retrain.types.Example with prompts that are text or "
                "lists of messages {role, content}."
            )
    named = [example if example.example_id else replace(example, example_id=f"{split}-{i}") for i, example in enumerate(examples)]
    data = type(config.data)(prompt_template=PLAIN_TEMPLATE, chat_template_args=config.data.chat_template_args)
    return ReadResult(data, subset(named, config.training.max_examples if split == "train" else 0))
