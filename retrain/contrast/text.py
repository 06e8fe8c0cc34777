"""A contrast as text: a table of the arms, then a sentence for each that says what to expect."""

from collections.abc import Iterator

from retrain.advantages.transforms import sure_sentence
from retrain.contrast.gradients import SAME, ArmGradient, Contrast
from retrain.records.terminal import counted, table_lines


def text_lines(seen: Contrast) -> Iterator[str]:
    yield (
        f"{seen.prompts} prompts, {seen.completions:,} completions, {seen.tokens:,} tokens, pass"
        f" rate {seen.pass_rate:.0%}: {seen.batch}."
    )
    yield ""
    base = seen.arms[0]
    heads = ("", "cosine", "norm", "halves", "90% of halvings", "planning", "right", "wrong")
    rows: list[tuple[str, ...]] = [(*heads, "first quarter", "last quarter", "gold")]
    rows += [_row(arm) for arm in seen.arms]
    yield from table_lines(rows, right=tuple(range(1, len(rows[0]))))
    yield ""
    yield (
        f"cosine: to {base.label}. halves: of an arm with itself, between halves of the prompts."
        " Then shares of the update."
    )
    if base.gold is not None:
        yield (
            "gold: predicted change of a held-out answer's log-prob, in nats, by a step of length"
            " lr x sqrt(parameters)."
        )
    yield from sentences(seen)


def _row(arm: ArmGradient) -> tuple[str, ...]:
    right = arm.shares["right completions"]
    shares = (arm.shares["planning tokens"], right, 0.0 if arm.is_flat else 1 - right)
    quarters = (arm.shares["first quarter"], arm.shares["last quarter"])
    return (
        arm.label,
        f"{arm.cosine:.4f}",
        f"{arm.norm:.3g}",
        f"{arm.halves:.2f}",
        f"{arm.halves_low:.2f} to {arm.halves_high:.2f}",
        *(f"{share:.0%}" for share in (*shares, *quarters)),
        "-" if arm.gold is None else f"{arm.gold:+.2g}",
    )


def sentences(seen: Contrast) -> Iterator[str]:
    """Forecast a campaign between these arms. It warns and decides nothing."""
    base = seen.arms[0]
    if base.is_flat:
        yield (
            f"{base.label} has no gradient on this batch, so nothing can be said beside it; give"
            " more prompts (--prompts), or another baseline first."
        )
    else:
        yield from (f"{arm.label}: {_sentence(seen, arm)}" for arm in seen.arms[1:])
    yield from (f"{arm.label}: {arm.note}." for arm in seen.arms if arm.note)
    if warning := sure_sentence(seen.top_share, base.halves):
        yield f"Warning: {warning}"


def _sentence(seen: Contrast, arm: ArmGradient) -> str:
    base = seen.arms[0]
    if arm.is_flat:
        return "no gradient on this batch."
    if arm.cosine >= SAME:
        return (
            f"the baseline's gradient times {arm.norm / base.norm:.4f}; AdamW undoes a constant"
            " factor, unless max_grad_norm or another term of the loss sees it."
        )
    agreement = (
        f"these arms' gradients have cosine {arm.cosine:.3f}, while one arm agrees with itself by"
        f" {base.halves:.2f}"
    )
    needed, seeds = seen.seeds_for(arm), counted(seen.seeds, "seed")
    steps = counted(seen.steps, "step")
    if seen.effect(arm) is None:
        return f"{agreement}: that is noise alone; give more prompts (--prompts)."
    if needed is None or needed > seen.seeds:
        if needed:
            enough = f"about {needed:,} might, if the difference lasts"
        else:
            enough = "nor will any number that one can run"
        return f"{agreement}: {seeds} will not tell them apart ({enough} for {steps})."
    return (
        f"{agreement}: {seeds} can tell them apart, if the difference lasts for {steps}"
        f" (in {seen.power(arm):.0%} of campaigns at best)."
    )
