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
    "advantage": "Advantage: what a completion is worth among the completions of its prompt",
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

Run the algorithm of a paper, or use its settings with your own model. Each file of
`examples/papers` runs on the lab, without a GPU:

```bash
retrain examples/papers/dapo.toml
# the method alone, on the file's model and data
retrain examples/lab.toml --algorithm-mode dapo --max-steps 2 --log-dir logs/dapo
```

In your own file, `algorithm_mode = "dapo"` sets the values below, and the file's own keys override
them ([recipes](advantages.md#whole-algorithms-algorithm_mode)). `retrain help papers` lists the
names. For Clip-Cov, GiGPO, GKD, OPSD and RENT, which have no such name, start from their file.

`tests/test_papers.py` compares the gradient of each file on one batch with the paper's formula in
float64. `make docs` writes this page from the files.

| symbol | meaning |
|---|---|
| oᵢ, \\|oᵢ\\|, Rᵢ, Aᵢ | a completion, its number of tokens, its reward and its advantage |
| G | the number of completions of a prompt |
| μ, π, ρᵢₜ | the policy that sampled, the policy that learns, and the ratio π(oᵢₜ)/μ(oᵢₜ) of a token |
| J | the objective, to maximize |

All files differ from their paper in this:

- They train a LoRA adapter on the [lab](lab.md), with rewards of 0 and 1. "At the paper's scale"
  has the paper's own settings, for you to copy.
- The means leave out a prompt with equal rewards, like DAPO's filter
  ([divisors](losses.md#what-is-divided-by-what)). Papers without a filter, and `constant`, count
  it, so their steps are smaller by the fraction of such prompts.
- Learning rate, gradient clip and number of steps fit the lab.

On policy, where every ratio is 1, `gspo`, `gmpo`, `sapo` and `ppo` with the same advantage and mean
have the same gradient.

A paper that is not here often needs one function: [from a paper to a
run](#a-loss-of-ones-own-from-a-paper-to-a-run).
"""

WITHOUT_A_FILE = """\
## Without a file, and why

Another name of an existing method:

| paper | here |
|---|---|
| NSR, PSR ([2506.01347](https://arxiv.org/abs/2506.01347)) | [W-REINFORCE](#w-reinforce) with `right = 0`, and with `right = 1`, `wrong = 0` |
| CFPO ([2601.22801](https://arxiv.org/abs/2601.22801)) | a quadratic instead of the clip, as in [Simple Policy Optimization](#simple-policy-optimization) |
| SDFT ([2601.19897](https://arxiv.org/abs/2601.19897)), SDPO ([2601.20802](https://arxiv.org/abs/2601.20802)) | [OPSD](#opsd) with another `teacher_prompt`; SDPO's feedback of an environment has no place in it |
| DPPO's bound on the KL, top-k | the binary form alone is built in: [DPPO](#dppo) |
| TIS, sequence TIS, sequence masks, geometric rejection | `[loss] correction`, as [IcePop](#icepop) sets it ([corrections](losses.md#a-correction-for-the-mismatch)) |
| GTPO ([2508.04349](https://arxiv.org/abs/2508.04349)) | `transform_mode = "gtpo"` has the means over a completion; `[gtpo] norm` and `negative` come nearer to the paper, which takes them at each position of a group |
| difficulty pools, no positive resampling | `[data] sampler`, as [ScaleRL](#scalerl) and [Frontier of learnability](#frontier-of-learnability) set it |
| temperature and KL schedules | `[schedule]` ([keys that move](advantages.md#keys-that-move-with-the-step)) |
| spurious rewards ([2506.10947](https://arxiv.org/abs/2506.10947)) | `[reward] type = "random"` or `"majority"`, on any file |
| LoRA without regret | `[model] lora_rank`, compared with `train = "full"` |

Not here, with the reason:

| paper | what is missing |
|---|---|
| KL-Cov ([2505.22617](https://arxiv.org/abs/2505.22617)) | it selects tokens over the whole batch and adds a term for them; a loss sees a micro-batch, and an advantage cannot add a term. [Clip-Cov](#clip-cov) of the same paper has a file |
| BAPO ([2510.18927](https://arxiv.org/abs/2510.18927)) | its clip moves until positive tokens have a given share of this update's loss, which a loss over a micro-batch does not know |
| GRPO-lambda ([2510.00194](https://arxiv.org/abs/2510.00194)) | nothing: an `algorithm` plugin can weight tokens by position. There is no file, because nobody has checked the variants of its trace weights |
| ProRL's reset of the reference ([2505.24864](https://arxiv.org/abs/2505.24864)) | `kl_coef` is against the base or the start. A reset is a second run from the merged adapter (`retrain export`) |
| role baselines (SPIRAL, [2506.24119](https://arxiv.org/abs/2506.24119)) | an episode has one policy and no roles. A baseline for each prompt is [SPO](#spo) |
| self-certainty (Intuitor, [2505.19590](https://arxiv.org/abs/2505.19590)) | it reads the whole distribution of a token; a plugin can read its entropy, as in [RENT](#rent) |
| ECHO, SFT mixes, LUFFY ([2504.14945](https://arxiv.org/abs/2504.14945)) | a cross-entropy on tokens that the policy did not sample, within a step of RL; [`[sft]`](sft.md) comes before RL |
| self-evolving curricula ([2505.14970](https://arxiv.org/abs/2505.14970)) | nothing: a [sampler](data.md#which-prompts-a-step-takes) sees the groups, not the advantages, so it would compute them again; there is no file |

"""

FROM_A_PAPER = """\
## A loss of one's own, from a paper to a run

TOPR above needs one function of eight lines. For any loss:

1. **Leave the mean to `aggregation`.** `1/G Σᵢ 1/|oᵢ| Σₜ` is `sequence_mean`. `1/Σᵢ|oᵢ| Σᵢ Σₜ` is
   `token_mean`, or `prompt_mean` if the sum is over one prompt. `1/G Σᵢ Σₜ` is `constant`, up to
   the factor `max_tokens`. The term of a token is what the sums contain.
2. **Change the sign, and detach weights.** A loss is -J. A weight before ∇log π has no gradient:
   `-weight.detach() * tokens.advantages * tokens.new`. A ratio with a gradient is
   `(tokens.new - tokens.old).exp()`.
3. **For a term over a whole completion**, `tokens.lengths` says where each completion ends.
   `sequence_means` and `spread` of `retrain.backends.local.loss` take a mean over each completion
   and return it to its tokens, as DeepSeek-V3.2's mask above does. Declare
   `f.sequence_level = True`. A dropped term is 0 and still counts in the mean.
4. **Put constants into `[loss.params]`.** The run stores them, and a campaign can vary them.
5. **Put the function into the folder of the TOML file** and name it: `mode = "topr.topr"` is `topr`
   in `topr.py`. `retrain explain FILE` and the run's first lines say which [tests it
   passes](losses.md#a-loss-of-ones-own).
6. **Compare it with the formula.** Ten lines in `tests/test_papers.py`, written like the paper,
   find a wrong sign, a missing detach and an extra mean.
7. **To add it to this page**, begin the TOML file with a comment like the other papers' files.
   The file's name becomes an `algorithm_mode`, so the file needs an `advantage_mode` and a
   `transform_mode`.

```bash
retrain explain examples/papers/topr.toml
retrain examples/papers/topr.toml --max-steps 2
```

`loss_metrics` in metrics.jsonl has the metrics that the function returns: for TOPR the mean weight
over the updates of a step.
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
    """Its Python file; "" if it has none."""
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
            f"Its plugin, [{paper.stem}.py](../retrain/assets/papers/{paper.stem}.py):",
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
