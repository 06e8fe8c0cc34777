"""The documents: those made from the code are complete and as the code makes them now, and every
block runs as pasted.
"""

import re
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from retrain import train
from retrain.cli.usage import COMMANDS, EXAMPLES
from retrain.config import load_config
from scripts import docs_check
from scripts.docs_check import FENCE, SHELL
from scripts.docs_commands import commands_document, help_records
from scripts.docs_metrics import RECORDS, field_docs, metrics_document
from tests.pasted import Paste

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.__name__)
def test_every_recorded_field_is_explained_in_a_sentence(record: type) -> None:
    docs = field_docs(record)
    assert docs and not [name for name, doc in docs.items() if not doc.endswith(".")]


def test_the_page_of_metrics_has_not_drifted() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_document(), (
        "run `make docs`"
    )


def test_every_command_has_an_example_and_its_options_on_the_page_of_commands() -> None:
    page = commands_document()
    assert list(EXAMPLES) == list(COMMANDS)
    for name, example in EXAMPLES.items():
        assert example.startswith(f"retrain {name}") and example in page
    for option in ("--against", "--checkpoint", "--memory-gib", "--baseline", "--prompt-tokens"):
        assert f"`{option}" in page


# -- every block, pasted ---------------------------------------------------------------------------

TINY = (
    "--batch-size 1 --group-size 2 --max-tokens 8 --evaluation-max-examples 2 --reward-type random"
)

CAMPAIGN = "examples/campaign_lab.toml --log-dir logs/campaign"


NEEDS = re.compile(r"# needs: (GPU|hub|server)( \| (GPU|hub|server))*\n")


def blocks(path: Path, *, marked: bool = False) -> list[tuple[str, str]]:
    """(language, text) of each block that is not marked `run`, or of those that are; without the
    blocks that say what they need.
    """
    found = FENCE.finditer(path.read_text(encoding="utf-8"))
    return [
        (block.group("language"), textwrap.dedent(block.group("body")))
        for block in found
        if (block.group("marks").strip() == "run") is marked
        and not NEEDS.match(textwrap.dedent(block.group("body")))
    ]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the pages are read: after `make run`, and after the campaign that most of
    them look at.
    """
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "retrain"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "retrain.toml", folder)
    programs = ("scripts/servers/tinker-setup.sh", "scripts/servers/tinker-start.sh")
    for name in (".venv/bin/activate", "docs/empty", *programs):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch(mode=0o755)
    train(
        load_config(
            ROOT / "examples/lab.toml", [*TINY.split(), "--log-dir", str(folder / "logs/lab")], {}
        ),
        quiet=True,
    )
    Paste(folder, folder / "logs/lab").shell(f"retrain {CAMPAIGN}")
    (folder / "logs/five").mkdir()
    (folder / "logs/five/winner").symlink_to("../campaign")
    return folder


PYTHON_ELSEWHERE = {"CONTRIBUTING.md": "tests/test_contributing.py"}
SLOW_PAGES = {
    *("AGENTS", "CONTRIBUTING", "campaigns", "capacity-planning", "commands", "comparing"),
    *("lab", "reading-a-run", "receipts", "research-guide", "xray"),
}
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def cases(pages: Iterable[Path]) -> list[Any]:
    return [
        pytest.param(
            path, marks=[pytest.mark.slow] if path.stem in SLOW_PAGES else [], id=path.stem
        )
        for path in pages
    ]


@pytest.mark.parametrize(
    "page", cases(path for path in PAGES if SHELL & {language for language, _ in blocks(path)})
)
def test_every_block_of_a_page_runs_as_pasted(page: Path, checkout: Path, tmp_path: Path) -> None:
    here = shutil.copytree(checkout, tmp_path / "checkout", symlinks=True)
    paste = Paste(here, checkout / "logs/lab")
    if f"\nretrain {CAMPAIGN}" in page.read_text(encoding="utf-8"):  # the page makes it
        shutil.rmtree(here / "logs/campaign")
    for language, text in blocks(page):
        if language in SHELL:
            paste.shell(text)
    if page.name not in PYTHON_ELSEWHERE:
        paste.python("\n".join(text for language, text in blocks(page) if language == "python"))
    assert not paste.problems


@pytest.mark.parametrize("page", cases(path for path in PAGES if blocks(path, marked=True)))
def test_a_block_marked_run_needs_nothing_but_an_empty_folder(
    page: Path, checkout: Path, tmp_path: Path
) -> None:
    paste = Paste(tmp_path, checkout / "logs/lab")
    for _, text in blocks(page, marked=True):
        assert set(re.findall("^model = (.+)", text, re.MULTILINE)) <= {'"lab"'}, "not the hub's"
        paste.shell(text)
    assert not paste.problems


def test_agents_are_told_of_every_command_that_prints_json() -> None:
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    named = page.partition("These commands take the flag:")[2].partition(". ")[0]
    printing = {
        name
        for name in COMMANDS
        if name != "help" and any("--json" in head for head, _ in help_records(name))
    }
    assert {f"`{name}`" for name in printing} == set(re.findall("`[a-z-]+`", named))


def test_what_agents_are_told_to_add_to_a_campaign_loads(tmp_path: Path) -> None:
    page = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    conditions = page.partition("<<'END'\n")[2].partition("END")[0]
    flags, rate, rates = re.findall(r"`(--campaign-parallel .+?|lr = .+?)`", page)
    labels = []
    for more in (rate, f"[campaign.grid]\n{rates}"):
        (tmp_path / "c.toml").write_text(f"{conditions}{more}\n")
        config = load_config(tmp_path / "c.toml", flags.split(), {})
        labels.append([condition.label.partition("~")[2] for condition in config.conditions])
    assert config.campaign and config.campaign.parallel and config.campaign.max_workers == 2
    assert labels == [["", "lr=0.0005"], ["lr=0.0001", "lr=0.0003"] * 2]


def test_what_a_block_needs_is_one_of_three() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    wrong = [line for line in texts.splitlines(keepends=True) if line.startswith("# needs:")]
    assert wrong and all(NEEDS.fullmatch(line) for line in wrong)


def test_a_table_that_a_phone_cannot_show_is_found_in_every_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(docs_check, "ROOT", tmp_path)
    wide, long = "| a | b | c | d | e |\n", f"| {'x' * 161} |\n"
    for name in ("docs/one.md", "docs/dev/two.md", "docs/a/three.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(wide + long, encoding="utf-8")
    found = [
        (problem.path.name, problem.line)
        for problem in docs_check.unreadable_tables({"docs/one.md"})
    ]
    # Cells of what is generated and of docs/dev hold whole sentences.
    assert sorted(found) == [("one.md", 1), ("three.md", 1), ("three.md", 2), ("two.md", 1)]


@pytest.mark.slow
def test_a_page_without_its_link_and_a_key_without_its_page_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    monkeypatch.setattr(docs_check, "ROOT", tmp_path)
    monkeypatch.setattr(docs_check, "documents", lambda: sorted(docs.rglob("*.md")))
    assert not [*docs_check.unlinked_pages(), *docs_check.unexplained_keys(set())]
    (docs / "new.md").write_text("# New\n", encoding="utf-8")
    (docs / "dev" / "new.md").write_text("# New\n", encoding="utf-8")
    for path in docs.rglob("*.md"):
        text = path.read_text(encoding="utf-8").replace("max_hours", "hours")
        path.write_text(text, encoding="utf-8")
    unlinked = {str(problem.path.relative_to(docs)) for problem in docs_check.unlinked_pages()}
    assert unlinked == {"new.md", "dev/new.md"}
    unexplained = docs_check.unexplained_keys({"docs/configuration.md"})
    assert "max_hours" in "".join(problem.text for problem in unexplained)
