"""A hook of mkdocs: files outside docs/ that the pages link are part of the site, below `source/`.

A link `../X` of a page leads out of docs/. A Markdown file X becomes a page, any other file is
copied, and links between them are rewritten. A folder has no page: its link becomes plain text.
An equation, LaTeX between two lines `$$`, becomes MathML.
"""

import posixpath
import re
from functools import partial
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)
_FENCE = re.compile(r"(?ms)^( *```.*?^ *```)")
_EQUATION = re.compile(r"(?ms)^\$\$\n(.*?)\n\$\$$")


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page, or a file so added, links."""
    waiting = [(file.src_uri, Path(file.abs_src_path)) for file in files.documentation_pages()]
    while waiting:
        uri, path = waiting.pop()
        for match in _LINK.finditer(path.read_text(encoding="utf-8")):
            target = _in_repository(uri, match["target"])
            added = f"source/{target}"
            if target is None or added in files.src_uris or target.startswith("docs/"):
                continue
            source = ROOT / target
            if source.is_file():
                found = File.generated(config, added, abs_src_path=str(source))
                found.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(found)
                if source.suffix == ".md":
                    waiting.append((added, source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links and equations outside blocks of code, which lose the mark `run`."""
    parts = _FENCE.split(re.sub(r"(?m)^```bash run$", "```bash", markdown))
    linked = partial(_rewritten, page.file.src_uri)
    parts[::2] = [_LINK.sub(linked, _EQUATION.sub(_drawn, part)) for part in parts[::2]]
    return "".join(parts)


def _drawn(match: re.Match[str]) -> str:
    return convert(match[1], display="block").replace("<mi>log</mi>", "<mo>log</mo>")


def _rewritten(uri: str, match: re.Match[str]) -> str:
    target = _in_repository(uri, match["target"])
    if target is None:
        return match.group()
    if (ROOT / target).is_dir():
        return match["text"]
    inside = target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}"
    relative = posixpath.relpath(inside, posixpath.dirname(uri) or ".")
    return f"{match['image']}[{match['text']}]({relative}{match['anchor'] or ''})"


def _in_repository(uri: str, target: str) -> str | None:
    """The path in the repository that a link of a page leads to; None for other addresses."""
    if ":" in target or target.startswith("/"):
        return None
    return posixpath.normpath(f"docs/{uri}/../{target}".removeprefix("docs/source/"))
