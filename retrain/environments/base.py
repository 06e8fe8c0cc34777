"""The contract of an environment: problems, and episodes that answer the model's replies until
their result.

An environment knows messages and text. Tokens, sampling, time limits and credit are retrain's
business, so a plugin is two small classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from retrain.types import ChatMessage, Example

Split = Literal["train", "evaluation"]


@dataclass(frozen=True)
class Observation:
    """Messages for the model before its next reply."""

    messages: list[ChatMessage]
    """The messages since its last reply; with `rewrites` the whole conversation."""
    rewrites: bool = False
    """True if `messages` are the whole conversation. A new training row begins if they do not
    continue what the model saw.
    """
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Functions that the model may call, as JSON schemas for the chat template."""


def is_conversation(messages: object) -> bool:
    """Return True if an environment gave a list of messages, each with a role and text."""
    return isinstance(messages, list | tuple) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    )


@dataclass(frozen=True)
class Result:
    """The reward of a whole episode."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other measures by name; retrain logs their means over a step."""
    turn_rewards: Sequence[float] = ()
    """The worth of each reply, if the environment says it. retrain logs it, but bases credit on
    `reward`.
    """


class Episode(ABC):
    """One conversation. retrain calls its methods one after the other, from a thread for this call
    alone.
    """

    @abstractmethod
    def reset(self, example: Example, seed: int) -> list[ChatMessage] | Observation | None:
        """Begin with the problem `example`. A return value of None opens with the example's prompt;
        messages replace it.

        `seed` is the same for all episodes of a group, and for the same step of a resumed run.
        """

    @abstractmethod
    def step(self, reply: str) -> list[ChatMessage] | Observation | None:
        """Return the messages that answer the model's reply, or None to end the episode."""

    @abstractmethod
    def result(self) -> Result:
        """Return the result. Called once, after the last reply: the episode ended, or its turns or
        tokens ran out.
        """

    def close(self) -> None:  # noqa: B027 - nothing to do unless overridden
        """Release what the episode holds. Called once, also after an error or a hang."""


class Environment(ABC):
    """Constructed as `Environment(**args)` from `[environment] args`. Raises what it likes: a run
    then stops before its first step.
    """

    max_turns: int = 0
    """Number of replies after which retrain ends an episode; 0 leaves it to the episodes.
    `[environment] max_turns` overrides it.
    """

    @abstractmethod
    def examples(self, split: Split) -> list[Example]:
        """Return the problems of one split, with the opening messages as their prompts."""

    @abstractmethod
    def episode(self) -> Episode:
        """Make a new conversation, to be reset."""

    def reference_replies(self, example: Example) -> Sequence[str] | None:
        """Return correct replies for the parity gate to try, or None if it knows none."""
        return None

    def close(self) -> None:  # noqa: B027 - nothing to do unless overridden
        """Release threads, loops and servers. Called once at the end of a run."""
