"""The page of `retrain audit --output`: its tables in the style of the report, as one HTML file
that loads nothing.
"""

from datetime import datetime
from pathlib import Path

from markupsafe import Markup

from retrain.audit.run import Audit, Judged, Rate
from retrain.audit.text import HEAD, judge_lines, milliseconds, rate_row, rate_rows
from retrain.errors import EnvironmentFailure
from retrain.records.disk import replace_file
from retrain.report.page import asset, content_policy, environment

_MAX_CHARACTERS = 200
"""Characters of an answer or reason on the page."""


def write_audit_page(audit: Audit, output: Path) -> None:
    """Write the page. Raises EnvironmentFailure where it cannot be written."""
    unjudged, everything = (
        sum(item.could_not_judge for item in audit.judged),
        Rate("", audit.judged),
    )
    tiles = [
        (audit.false_negatives.name, _percent(audit.false_negatives.error_rate)),
        (audit.false_positives.name, _percent(audit.false_positives.error_rate)),
        ("could not judge", f"{unjudged / len(audit.judged):.1%}"),
        ("time per completion, median", milliseconds(everything.seconds(0.5))),
        ("99%", milliseconds(everything.seconds(0.99))),
    ]
    page = (
        environment()
        .get_template("audit.html")
        .render(
            audit=audit,
            made=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}",
            policy=content_policy("", live=False),
            style=Markup(asset("report.css")),
            tiles=tiles,
            judge_lines=list(judge_lines(audit)),
            head=HEAD,
            rows=rate_rows(audit),
            forms=[rate_row(rate) for rate in audit.forms],
            example_head=("example", "form", "reference", "answer", "verdict", "time"),
            errors=[_example_row(item) for item in audit.worst(20)],
            slowest=[_example_row(item) for item in audit.slowest(5)],
        )
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(output, page)
    except OSError as error:
        raise EnvironmentFailure(
            f"{output} cannot be written: {error.strerror or error}; name another file with"
            " --output."
        ) from error


def _percent(rate: float | None) -> str:
    if rate is None:
        return "–"
    return f"{rate:.1%}"


def _example_row(item: Judged) -> tuple[str, ...]:
    case = item.case
    verdict = item.score.reason or item.score.outcome.value
    texts = (case.example.example_id, case.name, case.example.reference, case.answer, verdict)
    return (
        *(text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "…" for text in texts),
        milliseconds(item.seconds),
    )
