"""Forty-odd wrong inputs and the sentence that each gets: `python scripts/wrong_inputs.py` writes
docs/errors.md.

Every case is run through the command line as a user would, in a folder of its own.
tests/test_cli_wrong_inputs.py runs the same cases.
"""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from retrain.cli.main import main as retrain

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"

LAB = """[model]
model = "lab"
lora_rank = 4
[data]
source = "lab"
[algorithm]
transform_mode = "none"
[training]
seed = 0
max_steps = 1
batch_size = 2
group_size = 2
max_tokens = 8
temperature = 1.0
"""
"""A small right run, to which each case adds one mistake. Later tables replace keys of earlier
ones."""


@dataclass(frozen=True)
class Case:
    title: str
    code: int
    """The exit code."""
    says: str
    """A part of the sentence that must be there."""
    toml: str | None = ""
    """Put over LAB; None writes no file."""
    argv: tuple[str, ...] = ("run.toml",)
    files: dict[str, str] = field(default_factory=dict)


ROW = '{"prompt": "1+1=?", "answer": "2"}\n'
MODULE = "plugins_for_test.py"
CAMPAIGN_MARK = '{"kind": "campaign", "format": 1}'
RUN_MARK = '{"kind": "run", "format": 1}'
CONDITION = """[campaign]
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
"""

CASES = [
    # -- configuration -----------------------------------------------------------------------------
    Case("no file and no retrain.toml", 2, "retrain init", None, ()),
    Case("a file that does not exist", 2, "does not exist", None, ("absent.toml",)),
    Case("a command that does not exist", 2, "retrain init", None, ("inti",)),
    Case(
        "a command that a file does not need",
        2,
        "`retrain run.toml` trains",
        "",
        ("train", "run.toml"),
    ),
    Case(
        "an option that a command does not have",
        2,
        "--format",
        None,
        ("status", "--formatt", "json"),
    ),
    Case(
        "a value that an option does not take",
        2,
        "text or json",
        None,
        ("status", "--format", "xml"),
    ),
    Case("TOML that does not parse", 2, "not valid TOML", "[training\nlr = 1"),
    Case("a section that does not exist", 2, "training", "[trainin]\nlr = 1e-4"),
    Case("a key that does not exist", 2, "batch_size", "[training]\nbatchsize = 4"),
    Case("a string for a number", 2, "number", '[training]\nlr = "1e-4"'),
    Case("a boolean for a number", 2, "integer", "[training]\nmax_steps = true"),
    Case("a number out of range", 2, "at least 1", "[training]\nbatch_size = 0"),
    Case("not a number", 2, "lr", "[training]\nlr = nan"),
    Case("a value outside a closed set", 2, "token_mean", '[loss]\naggregation = "tokenmean"'),
    Case("a misspelt advantage", 2, "maxrl", '[algorithm]\nadvantage_mode = "maxlr"'),
    Case("one token to choose from", 2, "top_k", "[training]\ntop_k = 1"),
    Case(
        "HICRA's alpha above 1",
        2,
        "alpha",
        '[algorithm]\ntransform_mode = "gtpo_hicra"\n[hicra]\nalpha = 1.5',
    ),
    Case(
        "SEPA without a ramp",
        2,
        "steps",
        '[algorithm]\ntransform_mode = "gtpo_sepa"\n[sepa]\nsteps = 0',
    ),
    Case(
        "entropy_mask without rho",
        2,
        "surprisal_mask_rho",
        '[algorithm]\ntransform_mode = "entropy_mask"',
    ),
    Case("a correction against sampled log-probs", 2, "recomputed", '[loss]\ncorrection = "tis"'),
    Case("one checkpoint kept", 2, "keep_checkpoints", "[training]\nkeep_checkpoints = 1"),
    Case("a judge without a model", 2, "judge_model", '[reward]\ntype = "judge"'),
    Case("a removed key", 2, "migrate-config", '[backend]\nprime_rl_transport = "zmq"'),
    Case("a flag that does not exist", 2, "--batch-size", "", ("run.toml", "--batchsize", "4")),
    Case("a flag of another trainer", 2, "--lr", "", ("run.toml", "--learning-rate", "1e-4")),
    Case("an integer of 5,000 digits", 2, "4,300 digits", f"[training]\nmax_steps = {'9' * 5000}"),
    Case(
        "nesting without end",
        2,
        "nests deeper",
        f"[algorithm]\nadvantage_params = {'{a=' * 400}1{'}' * 400}",
    ),
    Case("a name that no disk holds", 2, "255 bytes", "", ("run.toml", "--log-dir", "a" * 300)),
    Case(
        "a step that no machine holds", 2, "at most 1000000", "[training]\nbatch_size = 1000000000"
    ),
    Case(
        "a user whom the machine does not have",
        2,
        "no user",
        '[squeeze]\nadapter_path = "~nosuchuser/adapter"',
    ),
    Case(
        "a marker of another shape",
        1,
        "holds a list",
        '[logging]\nlog_dir = "old"',
        files={"old/.retrain.json": "[]"},
    ),
    Case("a flag without its value", 2, "--lr", "", ("run.toml", "--lr")),
    Case("a flag with a wrong value", 2, "--max-steps", "", ("run.toml", "--max-steps", "many")),
    Case(
        "Shannon entropy on Tinker",
        2,
        "shannon_entropy",
        '[backend]\nbackend = "tinker"\n[algorithm]\nuncertainty_kind = "shannon_entropy"',
    ),
    Case(
        "Shannon entropy on PRIME-RL",
        2,
        "shannon_entropy",
        '[backend]\nbackend = "prime_rl"\n[algorithm]\nuncertainty_kind = "shannon_entropy"',
    ),
    *[
        Case(
            f"Shannon entropy with engine {engine}",
            2,
            "shannon_entropy",
            '[algorithm]\ntransform_mode = "gtpo"\nuncertainty_kind ='
            f' "shannon_entropy"\n[inference]\nengine = "{engine}"\nurl = "http://127.0.0.1:1"',
        )
        for engine in ("vllm", "sglang", "max", "mlx", "openai")
    ],
    # -- machine -----------------------------------------------------------------------------------
    Case("a device that is not there", 3, "gpu:7", '[backend]\ndevices = "gpu:7"'),
    Case(
        "a kernel for another device",
        2,
        "flash",
        '[inference]\nattention_kernel = "flash"\n[backend]\ndevices = "cpu"',
    ),
    Case(
        "a model that is neither a folder nor on the hub",
        3,
        "no/such-model",
        '[model]\nmodel = "no/such-model"',
    ),
    # -- data --------------------------------------------------------------------------------------
    Case("a data file that does not exist", 2, "rows.jsonl", '[data]\nsource = "rows.jsonl"'),
    Case(
        "a data file without a usable row",
        2,
        "no usable training row",
        '[data]\nsource = "rows.jsonl"',
        files={"rows.jsonl": '{"prompt": "1+1=?"}\n'},
    ),
    Case(
        "a data folder without its slash",
        2,
        '"./sums"',
        '[data]\nsource = "sums"',
        files={"sums/train.jsonl": ROW},
    ),
    Case(
        "columns of another name",
        2,
        'prompt_column = "q',
        '[data]\nsource = "q.jsonl"',
        files={"q.jsonl": '{"question": "1+1=?"}\n'},
    ),
    Case(
        "data in CSV",
        2,
        "one JSON object per line",
        '[data]\nsource = "rows.csv"',
        files={"rows.csv": "prompt,answer\n1+1=?,2\n"},
    ),
    Case(
        "the wrong column",
        2,
        "answer_column",
        '[data]\nsource = "rows.jsonl"\nanswer_column = "gold"',
        files={"rows.jsonl": ROW},
    ),
    Case("an unknown data source", 2, "gsm8k", '[data]\nsource = "gms8k"'),
    Case(
        "held-out evaluation without held-out data",
        2,
        "held-out",
        '[data]\nsource = "rows.jsonl"\n[evaluation]\nat_end = true',
        files={"rows.jsonl": ROW * 8},
    ),
    Case("a difficulty that the lab does not have", 2, "difficulty", "[data]\ndifficulty = 9"),
    # -- rewards -----------------------------------------------------------------------------------
    Case(
        "a reward module that does not exist",
        2,
        "no_such_reward",
        '[reward]\ntype = "custom"\ncustom_module = "no_such_reward"',
    ),
    Case(
        "a reward function that does not exist",
        2,
        "score",
        '[reward]\ntype = "custom"\ncustom_module = "plugins_for_test"',
        files={MODULE: "x = 1\n"},
    ),
    Case(
        "a reward that raises every time",
        1,
        "judge is down",
        '[reward]\ntype = "custom"\ncustom_module = "plugins_for_test"\n[training]\nbatch_size ='
        " 8\nmax_steps = 3",
        files={
            MODULE: "def score(response, reference):\n    raise RuntimeError('judge is down')\n"
        },
    ),
    Case(
        "weights that do not fit",
        2,
        "weights",
        '[reward]\ntype = ["match", "random"]\nweights = [1.0]',
    ),
    # -- plugins -----------------------------------------------------------------------------------
    Case(
        "an advantage module that does not exist",
        2,
        "no_such_module",
        '[algorithm]\nadvantage_mode = "no_such_module.advantage"',
    ),
    Case(
        "an advantage of the wrong length",
        2,
        "plugins_for_test.one",
        '[algorithm]\nadvantage_mode = "plugins_for_test.one"',
        files={MODULE: "def one(rewards):\n    return [1.0]\n"},
    ),
    Case(
        "a transform that is no transform",
        2,
        "plugins_for_test.make",
        '[algorithm]\ntransform_mode = "plugins_for_test.make"',
        files={MODULE: "def make():\n    return 3\n"},
    ),
    Case(
        "a parameter that a built-in does not know",
        2,
        "scale",
        "[algorithm]\nadvantage_params = { scale = 2.0 }",
    ),
    # -- folders -----------------------------------------------------------------------------------
    Case(
        "a folder that holds a run already",
        2,
        "--overwrite",
        '[logging]\nlog_dir = "old"',
        files={"old/.retrain.json": RUN_MARK, "old/metrics.jsonl": ""},
    ),
    Case(
        "results that retrain did not make",
        2,
        "was not made by retrain",
        '[logging]\nlog_dir = "old"',
        ("run.toml", "--overwrite"),
        {"old/metrics.jsonl": ""},
    ),
    Case(
        "resuming a folder without a run",
        2,
        "holds no run",
        "",
        ("run.toml", "--resume", "old"),
        {"old/notes.txt": ""},
    ),
    Case(
        "resuming a checkpoint",
        2,
        "a part of the run old: name that",
        "",
        ("run.toml", "--resume", "old/checkpoints/step_000020"),
        {"old/.retrain.json": RUN_MARK, "old/checkpoints/step_000020/adapter_config.json": "{}"},
    ),
    Case(
        "a run in place of a file",
        2,
        "retrain old/config.toml --resume old",
        None,
        ("old",),
        {"old/.retrain.json": RUN_MARK},
    ),
    Case(
        "a run to resume that did not begin",
        2,
        "retrain FILE --resume old",
        None,
        ("--resume", "old"),
        {"old/.retrain.json": RUN_MARK},
    ),
    Case("a folder in place of a file", 2, "name the file", None, ("old",), {"old/notes.txt": ""}),
    Case(
        "a run resumed and overwritten",
        2,
        "leave one",
        "",
        ("run.toml", "--resume", "old", "--overwrite"),
        {"old/.retrain.json": RUN_MARK},
    ),
    Case(
        "a run resumed elsewhere",
        2,
        "--log-dir",
        "",
        ("run.toml", "--resume", "old", "--log-dir", "new"),
        {"old/.retrain.json": RUN_MARK},
    ),
    Case(
        "evaluating a folder without a run",
        2,
        "holds no run",
        "",
        ("eval", "old"),
        {"old/notes.txt": ""},
    ),
    # -- squeezing and looking ---------------------------------------------------------------------
    Case(
        "squeezing a folder without an adapter",
        2,
        "no adapter_config.json",
        '[squeeze]\nadapter_path = "old"',
        ("run.toml",),
    ),
    Case(
        "squeezing an adapter that is not LoRA",
        2,
        "only LORA",
        '[squeeze]\nadapter_path = "old"',
        ("run.toml",),
        {"old/adapter_config.json": '{"peft_type": "LOHA"}'},
    ),
    Case(
        "squeezing weights that are pickled",
        2,
        "safetensors",
        '[squeeze]\nadapter_path = "old"',
        ("run.toml",),
        {
            "old/adapter_config.json": '{"peft_type": "LORA", "r": 8, "lora_alpha": 16}',
            "old/adapter_model.bin": "",
        },
    ),
    Case(
        "the status of a folder that does not exist", 2, "is not a folder", "", ("status", "absent")
    ),
    # -- campaigns ---------------------------------------------------------------------------------
    Case(
        "a condition's key that does not exist",
        2,
        "did you mean loss.mode?",
        CONDITION + 'loss.mod = "ppo"',
    ),
    Case(
        "a condition's value that is wrong",
        2,
        "number 1: [loss] mode",
        CONDITION + 'loss.mode = "pp"',
    ),
    Case(
        "two conditions of one name",
        2,
        "a label of its own",
        CONDITION + CONDITION.removeprefix("[campaign]\n"),
    ),
    Case("a campaign over another", 2, "--overwrite", "[campaign]", ("run.toml", "--overwrite")),
    Case(
        "going on with a campaign that is not there",
        2,
        "holds no campaign",
        "[campaign]",
        ("run.toml", "--resume", "absent"),
    ),
    Case(
        "a run in a campaign's folder",
        2,
        "holds a campaign",
        "",
        ("run.toml", "--log-dir", "old"),
        {"old/.retrain.json": CAMPAIGN_MARK},
    ),
    # -- comparing ---------------------------------------------------------------------------------
    Case(
        "comparing a folder that is not a campaign",
        2,
        "--baseline",
        "",
        ("compare", "old"),
        {"old/notes.txt": ""},
    ),
    Case(
        "comparing with a folder without a run",
        2,
        "holds no run",
        "",
        ("compare", "old", "--baseline", "old"),
        {"old/notes.txt": ""},
    ),
    Case("planning without a spread", 2, "--sd", "", ("power", "--effect", "0.02")),
    Case("planning for no effect", 2, "--effect 0", "", ("power", "--effect", "0", "--sd", "0.02")),
]


def configuration(case: Case) -> str:
    """LAB with the case's keys over it, table by table."""
    import tomlkit

    try:
        added = tomlkit.parse(case.toml or "")
    except tomlkit.exceptions.ParseError:
        return case.toml or ""
    document = tomlkit.parse(LAB)
    for section, keys in added.items():
        if section in document:
            document[section].update(keys)  # type: ignore[union-attr]
        else:
            document[section] = keys
    return tomlkit.dumps(document)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def answer(case: Case) -> tuple[int, list[str]]:
    """The exit code and the lines on standard error."""
    with tempfile.TemporaryDirectory() as name, inside(Path(name)):
        for path, text in case.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
        if case.toml is not None:
            Path("run.toml").write_text(configuration(case), encoding="utf-8")
        errors = io.StringIO()
        modules = set(sys.modules)
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            code = retrain(list(case.argv))
        for module in set(sys.modules) - modules:
            if module.startswith("plugins_for_test"):
                del sys.modules[module]
        said = [
            line.removeprefix("retrain: ")
            for line in errors.getvalue().splitlines()
            if line.startswith("retrain: ")
        ]
        return code, [line.replace(name, "<folder>") for line in said]


def page() -> str:
    rows = []
    for case in CASES:
        code, said = answer(case)
        sentence = " ".join(said).replace("|", "\\|")
        rows.append(f"| {case.title} | {code} | {sentence} |")
    return "\n".join(
        [
            "# Wrong inputs and what they are answered",
            "",
            (
                "Made by `python scripts/wrong_inputs.py`, which runs every case through the"
                " command line."
            ),
            (
                "Exit codes: 1 the run failed, 2 wrong usage or configuration, 3 the machine lacks"
                " something."
            ),
            "",
            "| what is wrong | exit | the sentence |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{len(CASES)} cases: {PAGE}")
