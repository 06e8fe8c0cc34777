"""docs/papers.md: the papers of examples/papers, made from the comment at the head of each TOML
file, its settings and its plugin.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from retrain.config import TrainConfig, load_config
from retrain.config.recipes import METHOD

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "retrain" / "assets" / "papers"
_TITLE = re.compile(
    r"(?P<name>.+) \(arXiv (?P<arxiv>\d{4}\.\d{5})\)\n(?P<title>.+)\n(Changes: (?P<changes>.+)\n)?"
)
_PART = re.compile(r"^(Formula|Not reproduced|At the paper's scale|Source):\n", re.MULTILINE)

GROUPS = {
    "advantage": "Advantage: what a completion is worth beside the others of its prompt",
    "credit": "Credit: how that is spread over its tokens",
    "loss": "Loss: ratio, clip and weight of a token or a completion",
    "correction": "Correction: samplers that are not the policy that learns",
    "aggregation": "Aggregation: what is divided by what",
    "prompts": "Prompts: which are drawn",
    "rewards": "Rewards: what is right, and how several become one",
    "distillation": "Distillation: a teacher's log-probs",
}
"""What a paper changes -> the heading of its group."""

INTRODUCTION = """\
# Papers

You read a paper on RLVR and want its algorithm as a file that runs, or its settings for a model of
yours. Each file of `examples/papers` runs as it stands, on the lab and without a GPU:

```bash
retrain examples/papers/dapo.toml
retrain examples/lab.toml --algorithm-mode dapo --max-steps 2 --log-dir logs/dapo      # the method alone, on the file's model and data
```

`algorithm_mode = "dapo"` in a file of yours means the settings that are shown here, below those of
the file ([recipes](advantages.md#whole-algorithms-algorithm_mode)); `retrain help papers` lists the
names. Clip-Cov, GiGPO, GKD, OPSD and RENT have no such name: you start from their file.

The gradient of each on one fixed batch is compared with the paper's formula, written out in float64
(`tests/test_papers.py`). This page is made from the files by `make docs`.

In the formulas oᵢ is a completion of |oᵢ| tokens with the reward Rᵢ, G the number of completions of
a prompt, μ the policy that sampled, π the one that learns, ρᵢₜ = π(oᵢₜ)/μ(oᵢₜ) the ratio of a
token, and Aᵢ the advantage. J is maximised. What holds for all of them:

- They run on the [lab](lab.md) instead of the paper's model and data, with rewards of 0 and 1, and
  a LoRA adapter learns instead of all weights. "At the paper's scale" has what the paper says of
  its own runs, for a file that you change.
- A prompt whose completions all have the same reward has no advantage, and is left out of the
  means, as DAPO's filter does ([what is divided by what](losses.md#what-is-divided-by-what)).
  Papers without a filter count it, which makes their steps smaller by the fraction of such prompts.
  `constant` counts it too.
- The learning rate, the clip of the gradient's norm and the number of steps are the lab's.

No two files have the same gradient on that batch, to 1e-6. On policy, where every ratio is 1, many
losses are one: `gspo`, `gmpo`, `sapo` and `ppo` with the same advantage and mean
(the clip has nothing to do there).

A paper that is not here is often one function away:
[from a paper to a run](#a-loss-of-ones-own-from-a-paper-to-a-run).
"""

WITHOUT_A_FILE = """\
## Without a file, and why

Another name of what is there:

| paper | here |
|---|---|
| NSR, PSR ([2506.01347](https://arxiv.org/abs/2506.01347)) | [W-REINFORCE](#w-reinforce) with `right = 0`, and with `right = 1`, `wrong = 0` |
| CFPO ([2601.22801](https://arxiv.org/abs/2601.22801)) | a quadratic in place of the clip, as [Simple Policy Optimization](#simple-policy-optimization) has |
| SDFT ([2601.19897](https://arxiv.org/abs/2601.19897)), SDPO ([2601.20802](https://arxiv.org/abs/2601.20802)) | [OPSD](#opsd) with another `reference_prompt`; SDPO's feedback of an environment has no place in it |
| DPPO's bound on the KL, top-k | the binary form alone is built in: [DPPO](#dppo) |
| TIS, sequence TIS, sequence masks, geometric rejection | `[loss] correction`, as [IcePop](#icepop) sets it ([corrections](losses.md#a-correction-for-the-mismatch)) |
| GTPO ([2508.04349](https://arxiv.org/abs/2508.04349)) | `transform_mode = "gtpo"` has the means over a completion; `[gtpo] norm` and `negative` come nearer to the paper, which takes them at each position of a group |
| difficulty pools, no positive resampling | `[data] sampler`, as [ScaleRL](#scalerl) and [Frontier of learnability](#frontier-of-learnability) set it |
| temperature and KL schedules | `[schedule]` ([keys that move](advantages.md#keys-that-move-with-the-step)) |
| spurious rewards ([2506.10947](https://arxiv.org/abs/2506.10947)) | `[reward] type = "random"` or `"majority"`, on any file |
| LoRA without regret | `[model] lora_rank`; there is no arm that trains all weights |

Not here, with the reason:

| paper | what is missing |
|---|---|
| KL-Cov ([2505.22617](https://arxiv.org/abs/2505.22617)) | it picks tokens over the whole batch and gives them a term of their own; a loss sees a micro-batch, and an advantage cannot add a term. [Clip-Cov](#clip-cov) of the same paper has a file |
| BAPO ([2510.18927](https://arxiv.org/abs/2510.18927)) | its clip moves until positive tokens have a given share of this update's loss, which a loss that sees a micro-batch does not know; a [control](advantages.md#keys-that-move-with-the-step) could move it by the last step's record alone |
| GRPO-lambda ([2510.00194](https://arxiv.org/abs/2510.00194)) | nothing: an `algorithm` plugin weighs tokens by position. Its trace weights have variants that were not looked up, so there is no file |
| ProRL's reset of the reference ([2505.24864](https://arxiv.org/abs/2505.24864)) | `kl_coef` is always against the model of `[model]`. A reset is a second run that starts from the merged adapter (`retrain export`) |
| role baselines (SPIRAL, [2506.24119](https://arxiv.org/abs/2506.24119)) | an episode has one policy and no roles. A baseline for each prompt is [SPO](#spo) |
| self-certainty (Intuitor, [2505.19590](https://arxiv.org/abs/2505.19590)) | it reads the whole distribution of a token; its entropy is what there is, as in [RENT](#rent) |
| ECHO, SFT mixes, LUFFY ([2504.14945](https://arxiv.org/abs/2504.14945)) | a cross-entropy on tokens that the policy did not sample: every row here is the policy's own |
| self-evolving curricula ([2505.14970](https://arxiv.org/abs/2505.14970)) | nothing: a [sampler](data.md#which-prompts-a-step-takes) sees the groups, not the advantages, so it would compute them again; there is no file |

"""

FROM_A_PAPER = """\
## A loss of one's own, from a paper to a run

TOPR above took one function of eight lines. The way there, for any loss:

1. **Leave the mean to `aggregation`.** `1/G Σᵢ 1/|oᵢ| Σₜ` is `sequence_mean`, `1/Σᵢ|oᵢ| Σᵢ Σₜ` is
   `token_mean` (or `prompt_mean`, where the sum is over one prompt's completions), and `1/G Σᵢ Σₜ`
   is `constant`, up to the factor `max_tokens`. What is left under the sums is the term of a token.
2. **Turn the sign, and mark what has no gradient.** J is maximised and a loss is minimised. A
   weight in front of ∇log π is detached: `-weight.detach() * tokens.advantages * tokens.new`. A
   ratio under the gradient is `(tokens.new - tokens.old).exp()`.
3. **Does a term read its whole completion?** `tokens.lengths` says where each ends;
   `sequence_means` and `spread` of `retrain.backends.local.loss` take a mean over each and put it
   back to its tokens, as DeepSeek-V3.2's mask above does. The function declares
   `f.sequence_level = True`. A term that is dropped is 0 and still counts in the mean.
4. **Constants go to `[loss.params]`**, so that they are stored with the run, and a campaign can
   vary them.
5. **Put the function beside the TOML file** and name it: `mode = "topr.topr"` is `topr` in
   `topr.py`. `retrain explain FILE` and the run's first lines say what was
   [proved of it](losses.md#a-loss-of-ones-own), or in a sentence what does not hold.
6. **Compare it with the formula once.** A reference of ten lines beside those of
   `tests/test_papers.py`, written as the paper writes it, finds a wrong sign, a missing detach and
   a mean too many.
7. **Give it its place here**, if it is to stay: the comment at the head of the TOML file is its
   section of this page (name and arXiv id, title, `Changes`, `Formula`, `Not reproduced`, `At the
   paper's scale` if known, `Source`), and its name is an `algorithm_mode`. So it names an
   `advantage_mode` and a `transform_mode`; a plugin that is a whole `algorithm_mode` stays a file.

```bash
retrain explain examples/papers/topr.toml
retrain examples/papers/topr.toml --max-steps 2
```

What the function returns beside the terms is in metrics.jsonl as `loss_metrics`: for TOPR the mean
weight over the updates of a step.
"""


@dataclass(frozen=True)
class Paper:
    """One file, as it is shown."""

    stem: str
    name: str
    arxiv: str
    title: str
    changes: str
    """What it changes, as names of GROUPS with commas between; the first is its group."""
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
    """Read the files, oldest paper first. Raises ValueError naming a file whose comment lacks a
    part.
    """
    return sorted((_paper(path) for path in FOLDER.glob("*.toml")), key=lambda paper: paper.arxiv)


def papers_document() -> str:
    """The text of docs/papers.md."""
    found = papers()
    return "\n".join(
        [
            INTRODUCTION,
            *_table(found),
            "",
            *_groups(found),
            WITHOUT_A_FILE,
            FROM_A_PAPER.rstrip(),
            "",
        ]
    )


def _groups(found: list[Paper]) -> Iterator[str]:
    """The sections of the papers, under the heading of what each changes first."""
    for group, heading in GROUPS.items():
        members = [paper for paper in found if paper.changes.split(", ")[0] == group]
        if members:
            yield from (f"## {heading}", "")
        for paper in members:
            yield from _section(paper)


def _paper(path: Path) -> Paper:
    lines = path.read_text(encoding="utf-8").splitlines()
    stop = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    comment = "".join(line.removeprefix("#").removeprefix(" ") + "\n" for line in lines[:stop])
    title = _TITLE.match(comment)
    pieces = _PART.split(comment)
    parts = {name: text.strip("\n") for name, text in zip(pieces[1::2], pieces[2::2], strict=True)}
    if title is None or not parts.keys() >= {"Formula", "Not reproduced", "Source"}:
        raise ValueError(
            f"{path} must begin with a comment: name (arXiv id), title, Formula, Not reproduced,"
            " Source"
        )
    plugin = path.with_suffix(".py")
    return Paper(
        stem=path.stem,
        **{name: text or "loss" for name, text in title.groupdict().items()},
        formula=parts["Formula"],
        missing=parts["Not reproduced"],
        scale=parts.get("At the paper's scale", ""),
        source=parts["Source"],
        settings="\n\n".join(_settings("\n".join(lines[stop:]))),
        plugin=plugin.read_text(encoding="utf-8").rstrip() if plugin.is_file() else "",
        config=load_config(path, environ={}),
    )


def _settings(text: str) -> Iterator[str]:
    """Yield [algorithm], [loss] and their tables, a sampler of [data], [reward] where it is the
    method's, and of [training] the keys in METHOD, as the file has them.
    """
    for table in re.findall(r"^\[.+?(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL):
        header, *lines = table.splitlines()
        section = header.strip("[]").partition(".")[0]
        keys = [line for line in lines if line and not line.startswith(("max_grad_norm", "source"))]
        if section == "training":
            keys = [line for line in keys if line.startswith(METHOD)]
        if keys == ['type = "match"']:
            continue
        if keys and section in (
            "environment",
            "data",
            "reward",
            "algorithm",
            "training",
            "loss",
            "schedule",
            "hicra",
        ):
            yield "\n".join([header, *keys])


def _table(found: list[Paper]) -> Iterator[str]:
    yield "| paper | changes | advantage | `[loss] mode`, `aggregation` |"
    yield "|---|---|---|---|"
    places = {group: place for place, group in enumerate(GROUPS)}
    for paper in sorted(found, key=lambda paper: places[paper.changes.split(", ")[0]]):
        algorithm, loss = paper.config.algorithm, paper.config.loss
        advantage = algorithm.modes[0] or algorithm.algorithm_mode
        anchor = re.sub(r"[^\w -]", "", paper.name).lower().replace(" ", "-")
        file = f"[file](../retrain/assets/papers/{paper.stem}.toml)"
        cells = f"`{advantage}` | `{loss.mode}`, `{loss.aggregation}`"
        yield f"| [{paper.name}](#{anchor}) ({file}) | {paper.changes} | {cells} |"


def _section(paper: Paper) -> Iterator[str]:
    yield from (
        f"### {paper.name}",
        "",
        f"{paper.title}, [arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv}).",
        "",
    )
    yield from _block("text", _unindented(paper.formula))
    yield from _block("toml", paper.settings)
    if paper.plugin:
        yield from (
            f"with [{paper.stem}.py](../retrain/assets/papers/{paper.stem}.py) beside it:",
            "",
        )
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
