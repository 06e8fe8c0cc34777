"""An audit in a terminal: rates by kind and by form, the worst examples, the slowest."""

from collections.abc import Iterator

from retrain.audit.run import Audit, CaseResult, Rate
from retrain.records.terminal import counted, one_line, table_lines

HEAD = ("", "cases", "errors", "rate", "95% interval", "not judged", "median", "99%")
_FORMS_SHOWN = 12
_EXAMPLES_SHOWN = 6
_ANSWER_WIDTH = 60
_REWARD_WIDTH = 160


def to_text(audit: Audit) -> str:
    return "\n".join(_lines(audit)) + "\n"


def _lines(audit: Audit) -> Iterator[str]:
    reward, examples = one_line(audit.reward, _REWARD_WIDTH), counted(audit.examples, "example")
    yield (
        f"Audit of {reward} on {examples} of {audit.source}:"
        f" {counted(len(audit.judged), 'completion')}"
    )
    yield f"in {audit.seconds:.1f} s ({len(audit.judged) / audit.seconds:,.0f} per second)."
    yield from judge_lines(audit)
    yield ""
    yield from table_lines([HEAD, *rate_rows(audit)], right=range(1, 8))
    erring = [rate for rate in audit.forms if rate.errors]
    if erring:
        yield ""
        yield from table_lines(
            [("form", *HEAD[1:]), *(rate_row(rate) for rate in erring[:_FORMS_SHOWN])],
            right=range(1, 8),
        )
    if len(erring) > _FORMS_SHOWN:
        yield (
            f"and {counted(len(erring) - _FORMS_SHOWN, 'other form')} with errors (--json lists"
            " all)"
        )
    for title, items in (("Errors", audit.worst(_EXAMPLES_SHOWN)), ("Slowest", audit.slowest(3))):
        if items:
            yield ""
            yield f"{title}:"
            yield from (f"  {example_line(item)}" for item in items)


def judge_lines(audit: Audit) -> Iterator[str]:
    usage = audit.usage
    if usage.requests or usage.cached:
        if usage.cost is None:
            cost = ""
        else:
            cost = f", cost {usage.cost:g}"
        yield (
            f"The judge: {counted(usage.requests, 'request')},"
            f" {counted(usage.cached, 'repeated completion')}, {usage.prompt_tokens:,} tokens read"
            f" and {usage.completion_tokens:,} written{cost}."
        )


def rate_rows(audit: Audit) -> list[tuple[str, ...]]:
    """The two rates that count, then their kinds of cases."""
    right = [rate for rate in audit.kinds if rate.cases and rate.cases[0].case.right]
    wrong = [rate for rate in audit.kinds if rate.cases and not rate.cases[0].case.right]
    rows = []
    for total, parts in ((audit.false_negatives, right), (audit.false_positives, wrong)):
        rows.append(rate_row(total))
        rows += [("  " + row[0], *row[1:]) for row in map(rate_row, parts)]
    return rows


def rate_row(rate: Rate) -> tuple[str, ...]:
    low, high = rate.interval
    return (
        rate.name,
        f"{len(rate.cases):,}",
        f"{rate.errors:,}",
        "" if rate.error_rate is None else f"{rate.error_rate:.1%}",
        f"[{low:.1%}, {high:.1%}]" if rate.judged else "",
        f"{rate.could_not_judge:,}",
        milliseconds(rate.seconds(0.5)),
        milliseconds(rate.seconds(0.99)),
    )


def milliseconds(seconds: float) -> str:
    if seconds < 0.01:
        return f"{1e3 * seconds:,.2f} ms"
    return f"{1e3 * seconds:,.0f} ms"


def example_line(item: CaseResult) -> str:
    case = item.case
    if item.could_not_judge:
        verdict = item.score.reason
    else:
        verdict = f"called {item.score.outcome.value}"
    answer = one_line(case.answer, _ANSWER_WIDTH)
    reference = one_line(case.example.reference, _ANSWER_WIDTH)
    return (
        f"{case.example.example_id} ({case.name}, {milliseconds(item.seconds)}): {answer!r} for"
        f" {reference!r} {verdict}"
    )
