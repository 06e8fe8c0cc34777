"""The question to a reward, and its answer."""

from dataclasses import dataclass

from retrain.types import Example, FinishReason, JudgeUsage


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
    token_count: int = 0
    """Tokens of the completion, a sampled EOS included; 0 if no model wrote it."""
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True)
class PartScore:
    """The score of one reward of a weighted sum: its value, or None with the reason. `types.Score`
    is the score of the sum.

    A reward of whole groups gives the score of each of the `members`; without them it failed, and
    its reason holds for all.
    """

    value: float | None
    reason: str = ""
    usage: JudgeUsage | None = None
    """Tokens and cost, if a language model judged."""
    members: "tuple[PartScore, ...]" = ()
