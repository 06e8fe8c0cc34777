"""The token-credit viewer of the page: every token with a shade per quantity and its numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.inspect import Quantity
from retrain.inspect.credit import CompletionCredit, StepCredit
from retrain.inspect.shading import levels, scale_of, values_of
from retrain.inspect.terminal import heading
from retrain.report.data import InspectedRun

_MAX_COMPLETIONS = 4
_MAX_TOKENS = 1500
_LETTERS = {
    Quantity.ADVANTAGE: "a",
    Quantity.SURPRISAL: "s",
    Quantity.ENTROPY: "e",
    Quantity.LOG_RATIO: "r",
}


@dataclass(frozen=True)
class TokenSpan:
    text: str
    classes: str
    """One shade per quantity (a-3: the third on the negative side), and `plan` inside a planning
    phrase."""
    numbers: str
    ends_line: bool


@dataclass(frozen=True)
class CompletionView:
    heading: str
    columns: Sequence[tuple[str, Sequence[TokenSpan]]]
    """(condition, tokens) for each transform shown."""
    left_out: int
    """Number of tokens not shown."""


@dataclass(frozen=True)
class TokenView:
    run: InspectedRun
    step: int
    prompt: str
    completions: Sequence[CompletionView]
    scales: Sequence[tuple[str, str, str]]
    """(letter, quantity, size that gets the strongest shade)."""
    notes: Sequence[str]


def token_view(run: InspectedRun) -> TokenView:
    """Build the view of the prompt's completions with the largest advantages."""
    credit = run.credit
    slot = credit.liveliest_slot()
    unknown = {
        Quantity.ENTROPY: credit.table.entropies is None,
        Quantity.LOG_RATIO: credit.table.log_ratios is None,
    }
    scales = {
        quantity: scale_of(credit, quantity) for quantity in Quantity if not unknown.get(quantity)
    }
    return TokenView(
        run=run,
        step=credit.step,
        prompt=credit.prompt(slot) or "(not stored)",
        completions=[
            _completion(credit, credit.completion(number), scales)
            for number in credit.of_slot(slot)[:_MAX_COMPLETIONS]
        ],
        scales=[
            (_LETTERS[quantity], quantity.value, f"{scale:.3g}")
            for quantity, scale in scales.items()
        ],
        notes=credit.notes,
    )


def _completion(
    credit: StepCredit, completion: CompletionCredit, scales: dict[Quantity, float]
) -> CompletionView:
    return CompletionView(
        heading=heading(completion),
        columns=[(label, _spans(completion, label, scales)) for label in credit.labels],
        left_out=max(0, len(completion.pieces) - _MAX_TOKENS),
    )


def _spans(
    completion: CompletionCredit, label: str, scales: dict[Quantity, float]
) -> list[TokenSpan]:
    count = len(completion.pieces)
    shades = {
        _LETTERS[quantity]: levels(values_of(completion, quantity, label), scale, count)
        for quantity, scale in scales.items()
    }
    spans = []
    for position, piece in enumerate(completion.pieces[:_MAX_TOKENS]):
        planning = completion.planning is not None and bool(completion.planning[position])
        classes = [
            f"{letter}{levels[position]}" for letter, levels in shades.items() if levels[position]
        ]
        spans.append(
            TokenSpan(
                text=piece.replace("\n", "↵") or "◌",
                classes=" ".join([*classes, "plan"] if planning else classes),
                numbers=_numbers(completion, label, position, planning),
                ends_line=piece.endswith("\n"),
            )
        )
    return spans


def _numbers(completion: CompletionCredit, label: str, position: int, planning: bool) -> str:
    stages = " → ".join(
        f"{stage} {values[position]:+.4f}" for stage, values in completion.stages[label].items()
    )
    parts = [f"token {position}", stages, f"surprisal {completion.surprisals[position]:.3f}"]
    if completion.entropies is not None:
        parts.append(f"entropy {completion.entropies[position]:.3f}")
    if completion.log_ratios is not None:
        parts.append(f"log-ratio {completion.log_ratios[position]:+.1e}")
    if completion.kept is not None:
        parts.append(f"one of {completion.kept[position]} tokens")
    return ", ".join([*parts, "planning"] if planning else parts)
