"""Check the documents: `make docs-check`; with --write, write those that are made from the code:
`make docs`.

Generated files must equal what the code generates. In every Markdown file links must lead to
existing files, `make` targets must exist, `retrain` command lines must parse, TOML blocks load, and
Python blocks compile. Prints one line per problem; exit code 1 if there is any.
"""

import ast
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from retrain.cli.main import is_path
from retrain.cli.man import synced
from retrain.cli.manual import read_source, source_path
from retrain.cli.parameters import command_named
from retrain.cli.run import parse_arguments
from retrain.cli.usage import COMMANDS
from retrain.config import config_from_toml
from retrain.config.keys import all_keys, flags
from retrain.errors import ConfigurationError
from scripts.docs_api import api_document
from scripts.docs_coming_from import coming_from_document
from scripts.docs_commands import commands_document
from scripts.docs_environment import environment_document
from scripts.docs_keys import artifacts
from scripts.docs_metrics import metrics_document
from scripts.docs_papers import papers_document
from scripts.prose import over_budget

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)(?P<marks>[^\n]*)\n(?P<body>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)
_LINK_TEXT = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)\s]+)")
SHELL = {"bash", "sh", "shell", "console"}


@dataclass(frozen=True)
class Problem:
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        for name, text in generated().items():
            (ROOT / name).write_text(text, encoding="utf-8")
        (ROOT / "llms.txt").write_text(llms_document(), encoding="utf-8")  # of the new pages
    elif arguments:
        sys.exit("usage: python scripts/docs_check.py [--write]")
    problems = [
        *_drifted(),
        *unlinked_pages(),
        *unexplained_keys(set(generated())),
        *unreadable_tables(set(generated())),
        *(problem for path in documents() for problem in check_document(path)),
    ]
    problems += [Problem(ROOT / "scripts/prose.py", 1, text) for text in over_budget()]
    for problem in problems:
        print(problem)
    print(f"docs-check: {len(documents())} documents, {len(problems)} problems")
    return 1 if problems else 0


def documents() -> list[Path]:
    """The Markdown files that git knows or would add."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        "*.md",
    ]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def generated() -> dict[str, str]:
    """Paths of the files that are made from the code, and what they must hold."""
    pages = {
        "docs/metrics.md": metrics_document(),
        "docs/coming-from.md": coming_from_document(),
        "docs/commands.md": commands_document(),
        "docs/papers.md": papers_document(),
        "docs/api.md": api_document(),
        "docs/environment-variables.md": environment_document(),
        "llms.txt": llms_document(),
        ".claude/skills/retrain/SKILL.md": skill_document(),
        str(source_path().relative_to(ROOT)): synced(read_source()),
    }
    return {**artifacts(), **pages}


def _drifted() -> Iterator[Problem]:
    for name, text in generated().items():
        path = ROOT / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield Problem(path, 1, "differs from what the code generates; run `make docs`")


def llms_document() -> str:
    """llms.txt: links to AGENTS.md and to the pages of the manual, with the first sentence of each."""
    paths = [ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
    pages = [
        f"- [{_title(path)}]({path.relative_to(ROOT)}): {_first_sentence(path)}\n" for path in paths
    ]
    return f"# retrain\n\n> {_first_sentence(ROOT / 'AGENTS.md')}\n\n## Pages\n\n{''.join(pages)}"


SKILL = """\
---
name: retrain
description: Run and compare reinforcement learning experiments on language models with retrain. Use it \
to write a configuration or a plugin, start runs and campaigns, and read their verdicts.
---

"""


def skill_document() -> str:
    """The skill of coding agents: AGENTS.md, with links from the skill's folder."""
    agents = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    return SKILL + _LINK.sub(r"](../../../\1", agents)


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _first_sentence(path: Path) -> str:
    """The first sentence of a page that is prose, without links."""
    paragraphs = path.read_text(encoding="utf-8").split("\n\n")[1:]
    prose = next(text for text in paragraphs if not text.startswith(("```", "|", "#", "!")))
    return re.sub(r"(?<=\.) .*", "", _LINK_TEXT.sub(r"\1", " ".join(prose.split())))


def unlinked_pages() -> Iterator[Problem]:
    """Pages that neither the index nor, for docs/dev, any page links."""
    index = _linked(ROOT / "docs" / "README.md")
    anywhere = {target for path in documents() for target in _linked(path)}
    for path in documents():
        if path.parent == ROOT / "docs" and path.name != "README.md" and path not in index:
            yield Problem(path, 1, "has no link in docs/README.md")
        elif path.parent == ROOT / "docs" / "dev" and path not in anywhere:
            yield Problem(path, 1, "is linked by no page")


def _linked(path: Path) -> set[Path]:
    found = _LINK.finditer(path.read_text(encoding="utf-8"))
    return {(path.parent / match.group(1).partition("#")[0]).resolve() for match in found}


def unexplained_keys(made: set[str]) -> Iterator[Problem]:
    """Keys that no page written by hand names; `made` are the pages that are not."""
    pages = [path for path in documents() if str(path.relative_to(ROOT)) not in made]
    words = {
        word for path in pages for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))
    }
    for key in all_keys():
        if key.name not in words:
            text = f"[{key.section}] {key.name} is named by no page that is written by hand"
            yield Problem(ROOT / "docs" / "README.md", 1, text)


MAX_COLUMNS = 4
MAX_CELL = 160


def unreadable_tables(made: set[str]) -> Iterator[Problem]:
    """Tables of the manual that a phone cannot show; `made` are references, whose cells hold whole
    sentences, and so do those of docs/dev.
    """
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        prose = FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)
        for number, line in enumerate(prose.splitlines(), start=1):
            cells = re.split(r"(?<!\\)\|", _LINK_TEXT.sub(r"\1", line.strip().strip("|")))
            if not line.strip().startswith("|"):
                continue
            if len(cells) > MAX_COLUMNS:
                yield Problem(path, number, f"a table has more than {MAX_COLUMNS} columns")
            longest = max(len(cell.strip()) for cell in cells)
            sentences = path.parent.name == "dev" or str(path.relative_to(ROOT)) in made
            if longest > MAX_CELL and not sentences:
                yield Problem(path, number, f"a cell has more than {MAX_CELL} characters")


def check_document(path: Path) -> Iterator[Problem]:
    text = path.read_text(encoding="utf-8")
    for match in _LINK.finditer(text):
        name, _, anchor = match.group(1).partition("#")
        target = path.parent / name
        if not target.exists():
            yield Problem(path, _line(text, match.start()), f"{name} does not exist")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield Problem(path, _line(text, match.start()), f"{name} has no heading #{anchor}")
    for block in FENCE.finditer(text):
        line = _line(text, block.start("body"))
        for offset, problem in _check_block(
            block.group("language"), textwrap.dedent(block.group("body"))
        ):
            yield Problem(path, line + offset, problem)


def anchors(path: Path) -> set[str]:
    """The names by which links reach the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).lower() for text in headings]
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in plain}


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _check_block(language: str, body: str) -> Iterator[tuple[int, str]]:
    """(line inside the block, what is wrong) for each problem."""
    if language in SHELL:
        for offset, command in enumerate(body.splitlines()):
            problem = check_command(command.strip().removeprefix("$ "))
            if problem and f"cat > {problem.split()[0]} " not in body:  # the block writes it
                yield offset, problem
    elif language == "toml":
        yield from _check_toml(body)
    elif language == "python":
        try:
            ast.parse(body)
        except SyntaxError as error:
            yield (error.lineno or 1) - 1, f"is not Python: {error.msg}"


def _check_toml(body: str) -> Iterator[tuple[int, str]]:
    try:
        if "[" in body and not {"project", "build-system"} & set(tomllib.loads(body)):
            config_from_toml(body)
    except tomllib.TOMLDecodeError as error:
        yield 0, f"is not TOML: {error}"
    except ConfigurationError as error:
        yield from ((0, problem) for problem in error.problems)


def check_command(command: str) -> str | None:
    """The problem with a shell line that calls retrain, make or a script of this repository; None
    if there is none.
    """
    try:
        words = shlex.split(
            (
                command.partition(" | ")[-1]
                if " | retrain" in command
                else command.partition(" | ")[0]
            ),
            comments=True,
        )
    except ValueError:  # part of a here-document, or output
        return None
    words = words[
        next((index for index, word in enumerate(words) if "=" not in word), len(words)) :
    ]  # VARIABLE=value in front
    match words:
        case ["make", *targets]:
            return _first_unknown(targets, make_targets(), "target of the Makefile")
        case [program, *arguments] if Path(program).name == "retrain":
            return _check_retrain(arguments)
        case [program, script, *_] if Path(program).name.startswith("python") and script.endswith(
            ".py"
        ):
            return None if (ROOT / script).is_file() else f"{script} does not exist"
    return None


def _first_unknown(names: list[str], known: set[str], kind: str) -> str | None:
    return next(
        (
            f"{name} is no {kind}"
            for name in names
            if not name.startswith("-") and "=" not in name and name not in known
        ),
        None,
    )


def make_targets() -> set[str]:
    return set(
        re.findall(
            r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )


def _check_retrain(arguments: list[str]) -> str | None:
    if not arguments or arguments[0] in ("--help", "--version"):
        return None
    if arguments[0] in COMMANDS:
        return _first_unknown_flag(arguments[0], arguments[1:])
    if not arguments[0].startswith("-") and not is_path(arguments[0]):
        return f"{arguments[0]} is neither a command of retrain nor a path"
    try:
        parse_arguments(arguments)
    except ConfigurationError as error:
        return " ".join(error.problems)
    return None


def _first_unknown_flag(name: str, arguments: list[str]) -> str | None:
    """The problem with a flag that is neither the command's nor, where the command takes those, the
    configuration's.
    """
    command = command_named(name)
    known = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
    if command.context_settings.get("ignore_unknown_options"):
        known |= set(flags())
    given = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    return next(
        (f"{flag} is no flag of `retrain {name}`" for flag in given if flag not in known), None
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
