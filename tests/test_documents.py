"""The documents that are made from the code: complete, and as the code makes them now."""

from pathlib import Path

import pytest

from retrain.cli.usage import COMMANDS, EXAMPLES
from scripts.docs_commands import commands_document
from scripts.docs_metrics import RECORDS, field_docs, metrics_document

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.__name__)
def test_every_recorded_field_is_explained_in_a_sentence(record: type) -> None:
    docs = field_docs(record)
    assert docs and not [name for name, doc in docs.items() if not doc.endswith(".")]


def test_the_page_of_metrics_has_not_drifted() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_document(), "run `make docs`"


def test_every_command_has_an_example_and_its_options_on_the_page_of_commands() -> None:
    page = commands_document()
    assert list(EXAMPLES) == list(COMMANDS)
    assert all(example.startswith(f"retrain {name}") and example in page for name, example in EXAMPLES.items())
    assert all(f"`{option}" in page for option in ("--against", "--checkpoint", "--memory-gib", "--baseline", "--prompt-tokens"))
