"""What a reward is asked, and what it answers."""

from dataclasses import dataclass

from retrain.types import Example, JudgeUsage


@dataclass(frozen=True)
class ScoreRequest:
    """One completion to judge."""

    response: str
    """Text of the completion, without the prompt."""
    reference: str | None
    """The answer from the data source. An empty one or None never scores."""
    prompt: str
    """The rendered prompt."""
    example: Example
    step: int
    slot: int
    """The prompt's place in the step."""
    sample: int


@dataclass(frozen=True)
class PartScore:
    """The score of one reward of a weighted sum: its value, or None with the reason. `types.Score`
    is the sum's.
    """

    value: float | None
    reason: str = ""
    usage: JudgeUsage | None = None
    """Tokens and cost, if a language model judged."""
