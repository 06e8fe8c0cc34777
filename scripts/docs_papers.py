"""docs/papers.md: the papers of examples/papers, made from the comment at the head of each TOML file, its settings and its plugin."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from retrain.advantages.algorithms import recipe_of
from retrain.config import TrainConfig, load_config

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "papers"
METHOD = ("updates_per_batch", "minibatches", "dynamic_sampling")
"""Keys of [training] that belong to a method; the others are the lab's."""
_TITLE = re.compile(r"(?P<name>.+) \(arXiv (?P<arxiv>\d{4}\.\d{5})\)\n(?P<title>.+)\n")
_PART = re.compile(r"^(Formula|Not reproduced|At the paper's scale|Source):\n", re.MULTILINE)

INTRODUCTION = """\
# Papers

Made from `examples/papers/*.toml` by `make docs`. Each file runs as it stands, in half a minute on a CPU, and its gradient on one fixed
batch is compared with the paper's formula, written out in float64 (`tests/test_papers.py`):

```bash
retrain examples/papers/dapo.toml
```

In the formulas oᵢ is a completion of |oᵢ| tokens with the reward Rᵢ, G the number of completions of a prompt, μ the policy that sampled,
π the one that learns, ρᵢₜ = π(oᵢₜ)/μ(oᵢₜ) the ratio of a token, and Aᵢ the advantage. J is maximised. What holds for all of them:

- They run on the [lab](lab.md) instead of the paper's model and data, with rewards of 0 and 1, and a LoRA adapter learns instead of all
  weights. "At the paper's scale" has what the paper says of its own runs, for a file that you change.
- A prompt whose completions all have the same reward has no advantage, and is left out of the means, as DAPO's filter does
  ([what is divided by what](losses.md#what-is-divided-by-what)). Papers without a filter count it, which makes their steps smaller by the
  fraction of such prompts. `constant` counts it too.
- The learning rate, the clip of the gradient's norm and the number of steps are the lab's.

A paper that is not here is often one function away: [a loss of one's own](losses.md#a-loss-of-ones-own-from-a-paper-to-a-run).
"""


@dataclass(frozen=True)
class Paper:
    """One file, as it is shown."""

    stem: str
    name: str
    arxiv: str
    title: str
    formula: str
    missing: str
    """A Markdown list of what is not reproduced."""
    scale: str
    """A TOML text of the paper's own settings; "" if it is not known."""
    source: str
    settings: str
    """A TOML text of the keys that are the method."""
    plugin: str
    """The Python file beside it; "" if it has none."""
    config: TrainConfig


def papers() -> list[Paper]:
    """Read the files, oldest paper first. Raises ValueError naming a file whose comment lacks a part."""
    return sorted((_paper(path) for path in FOLDER.glob("*.toml")), key=lambda paper: paper.arxiv)


def papers_document() -> str:
    """The text of docs/papers.md."""
    found = papers()
    return "\n".join([INTRODUCTION, *_table(found), "", *(line for paper in found for line in _section(paper))])


def _paper(path: Path) -> Paper:
    lines = path.read_text(encoding="utf-8").splitlines()
    stop = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    comment = "".join(line.removeprefix("#").removeprefix(" ") + "\n" for line in lines[:stop])
    title = _TITLE.match(comment)
    pieces = _PART.split(comment)
    parts = {name: text.strip("\n") for name, text in zip(pieces[1::2], pieces[2::2], strict=True)}
    if title is None or not parts.keys() >= {"Formula", "Not reproduced", "Source"}:
        raise ValueError(f"{path} must begin with a comment: name (arXiv id), title, Formula, Not reproduced, Source")
    plugin = path.with_suffix(".py")
    return Paper(
        stem=path.stem,
        **title.groupdict(),
        formula=parts["Formula"],
        missing=parts["Not reproduced"],
        scale=parts.get("At the paper's scale", ""),
        source=parts["Source"],
        settings="\n\n".join(_settings("\n".join(lines[stop:]).strip())),
        plugin=plugin.read_text(encoding="utf-8").rstrip() if plugin.is_file() else "",
        config=load_config(path, environ={}),
    )


def _settings(text: str) -> Iterator[str]:
    """Yield [algorithm], [loss] and their tables, and of [training] the keys in METHOD, as the file has them."""
    for table in re.split(r"^(?=\[)", text, flags=re.MULTILINE):
        header, *lines = table.splitlines()
        section = header.strip("[]").partition(".")[0]
        keys = [line for line in lines if line and not line.startswith("max_grad_norm")]
        if section == "training":
            keys = [line for line in keys if line.startswith(METHOD)]
        if keys and section in ("algorithm", "training", "loss"):
            yield "\n".join([header, *keys])


def _table(found: list[Paper]) -> Iterator[str]:
    yield "| paper | advantage | `[loss] mode` | `aggregation` | file |"
    yield "|---|---|---|---|---|"
    for paper in found:
        algorithm, loss = paper.config.algorithm, paper.config.loss
        recipe = recipe_of(algorithm)
        advantage = recipe.advantage if recipe else algorithm.algorithm_mode
        anchor = re.sub(r"[^\w -]", "", paper.name).lower().replace(" ", "-")
        cells = f"`{advantage}` | `{loss.mode}` | `{loss.aggregation}`"
        yield f"| [{paper.name}](#{anchor}) | {cells} | [{paper.stem}.toml](../examples/papers/{paper.stem}.toml) |"


def _section(paper: Paper) -> Iterator[str]:
    yield from (f"## {paper.name}", "", f"{paper.title}, [arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv}).", "")
    yield from _block("text", _unindented(paper.formula))
    yield from _block("toml", paper.settings)
    if paper.plugin:
        yield from (f"with [{paper.stem}.py](../examples/papers/{paper.stem}.py) beside it:", "")
        yield from _block("python", paper.plugin)
    yield from ("Not reproduced:", "", paper.missing, "")
    if paper.scale:
        yield from ("At the paper's scale:", "")
        yield from _block("toml", _unindented(paper.scale))
    yield from ("Source:", "", paper.source, "")


def _unindented(text: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())


def _block(language: str, text: str) -> tuple[str, ...]:
    return (f"```{language}", text, "```", "")
