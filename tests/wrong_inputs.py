"""Wrong inputs and the sentence that each gets.

A printed case is run through the command line as a user would, in a folder of its own, by
tests/test_cli_wrong_inputs.py. A case whose sentence comes at loading is checked by
tests/test_config_errors.py, which is cheap.
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
    loads: bool = True
    """Whether the configuration can be loaded; else `toml` alone is refused with the sentence."""
    printed: bool = True
    """Whether the case is run through the command line."""


def at_load(title: str, toml: str, says: str, *, printed: bool = False) -> Case:
    """A case whose one sentence comes when the configuration is loaded."""
    return Case(title, 2, says, toml, loads=False, printed=printed)


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
        "'--format' / '--json': 'xml' is not one of 'text', 'json'. An example",
        None,
        ("status", "--format", "xml"),
    ),
    at_load("TOML that does not parse", "[training\nlr = 1", "is not valid TOML: ", printed=True),
    at_load(
        "distilling without a teacher",
        '[algorithm]\nalgorithm_mode = "distill"',
        '"distill" needs a teacher; set teacher to "base", "answer" or the folder of an adapter',
    ),
    at_load(
        "a teacher that does not see the answer",
        '[algorithm]\nalgorithm_mode = "distill"\nreference = "gold"\nreference_prompt = "{prompt}"',
        "[algorithm] teacher_prompt has no {answer}",
    ),
    at_load(
        "a date that is none",
        '[data]\nchat_template_args = { strftime_now = "yesterday" }',
        '[data] chat_template_args: strftime_now = "yesterday" is not a day such as',
    ),
    at_load(
        "a schedule of a key that is read once",
        '[schedule]\n"model.lora_rank" = [[0, 4], [10, 8]]',
        '"model.lora_rank" is not a key that a schedule can move. It can move ',
    ),
    at_load(
        "a schedule whose steps fall",
        '[schedule]\n"loss.kl_coef" = [[10, 0.1], [0, 0.0]]',
        '"loss.kl_coef" needs points [step, value] with rising steps',
    ),
    at_load(
        "two schedules of the learning rate",
        '[training]\nlr_schedule = "linear"\n[schedule]\n"training.lr" = [[0, 1e-3]]',
        '"training.lr" has a schedule already',
    ),
    at_load(
        "a section that does not exist",
        "[trainng]\nlr = 1.0",
        "[trainng] is not a section; did you mean [training]?",
        printed=True,
    ),
    at_load(
        "a key that does not exist",
        "[training]\nbatch_sise = 4",
        "[training] batch_sise is not a key; did you mean batch_size?",
        printed=True,
    ),
    at_load(
        "a string for a number",
        '[training]\nlr = "fast"',
        '[training] lr = "fast" is a string; allowed: a number of at least 0.',
        printed=True,
    ),
    at_load(
        "a boolean for a number",
        "[sepa]\nsteps = true",
        "[sepa] steps = true is a boolean; allowed: an integer of at least 0.",
        printed=True,
    ),
    Case("a number out of range", 2, "at least 1", "[training]\nbatch_size = 0"),
    at_load(
        "not a number",
        "[training]\nlr = nan",
        "[training] lr = nan is not a finite number; allowed: a number of at least 0.",
        printed=True,
    ),
    Case("a value outside a closed set", 2, "token_mean", '[loss]\naggregation = "tokenmean"'),
    at_load(
        "a misspelled advantage",
        '[algorithm]\nadvantage_mode = "maxlr"',
        'advantage_mode = "maxlr" is not known; allowed: grpo, maxrl, rloo',
        printed=True,
    ),
    at_load(
        "one token to choose from",
        "[training]\ntop_k = 1",
        "[training] top_k = 1 makes all completions of a prompt equal",
        printed=True,
    ),
    at_load(
        "HICRA's alpha above 1",
        "[hicra]\nalpha = 1.5",
        "[hicra] alpha = 1.5 is out of range; allowed: a number of at least 0 and at most 1.",
        printed=True,
    ),
    at_load(
        "SEPA without a ramp",
        '[algorithm]\ntransform_mode = "gtpo_sepa"\n[sepa]\nsteps = 0',
        '[sepa] steps = 0 with schedule = "linear" turns SEPA off in',
        printed=True,
    ),
    at_load(
        "entropy_mask without rho",
        '[algorithm]\ntransform_mode = "entropy_mask"',
        '"entropy_mask" needs surprisal_mask_rho above 0',
        printed=True,
    ),
    at_load(
        "a correction against sampled log-probs",
        '[loss]\ncorrection = "tis"',
        '[loss] correction = "tis" needs old_logprobs = "recomputed"',
        printed=True,
    ),
    at_load(
        "one checkpoint kept",
        "[training]\nkeep_checkpoints = 1",
        "keep_checkpoints = 1 leaves no second checkpoint",
        printed=True,
    ),
    at_load(
        "a judge without a model",
        '[reward]\ntype = "judge"',
        '[reward] type = "judge" needs judge_model',
        printed=True,
    ),
    at_load(
        "a removed key",
        '[backend]\nprime_rl_transport = "zmq"',
        "is now in [backend.options] transport; run `retrain migrate-config",
        printed=True,
    ),
    at_load(
        "a recipe as an advantage",
        '[algorithm]\nadvantage_mode = "dapo"',
        'my_advantage; "dapo" is a value of [algorithm] algorithm_mode.',
    ),
    at_load(
        "an advantage as a loss",
        '[loss]\nmode = "grpo"',
        '"grpo" is a value of [algorithm] algorithm_mode and [algorithm] advantage_mode.',
    ),
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
            f'[algorithm]\ntransform_mode = "gtpo"\nuncertainty_kind = "shannon_entropy"\n[inference]\nengine = "{engine}"\nurl = "http://127.0.0.1:1"',
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
        "a plugin whose file is named like a module of Python's own",
        2,
        "/json.py, since it has a module json of its own. Rename the file.",
        '[algorithm]\nadvantage_mode = "json.centered"',
        files={"json.py": "def centered(rewards):\n    return rewards\n"},
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
        '[reward]\ntype = "custom"\ncustom_module = "plugins_for_test"\n[training]\nbatch_size = 8\nmax_steps = 3',
        files={
            MODULE: "def score(response, reference):\n    raise RuntimeError('judge is down')\n"
        },
    ),
    at_load(
        "weights that do not fit",
        '[reward]\ntype = ["match", "math"]\nweights = [1.0]',
        "weights has 1 numbers and type has 2 rewards",
        printed=True,
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
        "it is a part of the run ",
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
    Case(
        "a folder in place of a file", 2, "name a TOML file", None, ("old",), {"old/notes.txt": ""}
    ),
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
    at_load(
        "a condition's key that does not exist",
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\nlrr = 1.0',
        "lrr is not a key of a condition",
        printed=True,
    ),
    Case(
        "a condition's value that is wrong",
        2,
        "number 1: [loss] mode",
        CONDITION + 'loss.mode = "pp"',
    ),
    at_load(
        "two conditions of one name",
        '[campaign]\nconditions = [{advantage_mode = "a.f", transform_mode = "none"}, {advantage_mode = "b.f", transform_mode = "none"}]',
        'are both called "f+none"',
        printed=True,
    ),
    Case("a campaign over another", 2, "--overwrite", "[campaign]", ("run.toml", "--overwrite")),
    Case(
        "going on with a campaign that is not there",
        2,
        "is not a campaign",
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
    # -- a report ----------------------------------------------------------------------------------
    Case(
        "a report written into a picture",
        2,
        "Its figures go next to it as svg and png",
        "",
        ("report", "old", "--output", "x.svg"),
        {"old/notes.txt": ""},
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
    Case(
        "integer of a flag in scientific notation",
        2,
        "flag --max-steps: [training] max_steps = 1000.0 is a float; write 1000; allowed:",
        "",
        ("run.toml", "--max-steps", "1e3"),
    ),
    Case(
        "Python's word for a switch",
        2,
        'flag --evaluation-at-start: [evaluation] at_start = "False" is a string; allowed: true or',
        "",
        ("run.toml", "--evaluation-at-start", "False"),
    ),
    Case(
        "relative data that is in neither folder",
        2,
        '[data] source = "rows.jsonl" does not exist in <folder>, the current folder, or beside',
        '[data]\nsource = "rows.jsonl"',
    ),
    Case("planning without a spread", 2, "--sd", "", ("power", "--effect", "0.02")),
    Case("planning for no effect", 2, "--effect 0", "", ("power", "--effect", "0", "--sd", "0.02")),
    # -- configuration, not printed -------------------------------------------------------------------
    at_load(
        "key of another section",
        "[training]\nlora_rank = 4",
        "[training] lora_rank is not a key; lora_rank belongs under [model].",
    ),
    at_load(
        "key outside of a section",
        "lr = 1.0",
        "lr = 1.0 stands outside of a section; it belongs under [training].",
    ),
    at_load(
        "section that is a value", "training = 3", "[training] is a section, and here it is 3."
    ),
    at_load(
        "text for an integer",
        '[training]\nbatch_size = "8"',
        '[training] batch_size = "8" is a string; allowed: an integer of at least 1 and at most 1000000.',
    ),
    at_load(
        "fraction for an integer",
        "[training]\ngroup_size = 4.5",
        "[training] group_size = 4.5 is a number with a fraction; allowed:",
    ),
    at_load(
        "float for an integer",
        "[training]\nmax_steps = 1e3",
        "[training] max_steps = 1000.0 is a float; write 1000; allowed:",
    ),
    at_load(
        "line break in a folder's name",
        '[logging]\nlog_dir = "logs/a\\nb"',
        r'[logging] log_dir = "logs/a\nb" holds a control character',
    ),
    at_load(
        "address of a request",
        '[inference]\nurl = "http://127.0.0.1:8000/v1/chat/completions"',
        '/v1/chat/completions" is the address of a request, not of its server; leave'
        " /chat/completions out.",
    ),
    at_load(
        "file for a module",
        '[reward]\ntype = "custom"\ncustom_module = "rewards/rew.py"',
        'custom_module = "rewards/rew.py" is the name of a file; write its module, "rewards.rew".',
    ),
    at_load(
        "integer for a boolean",
        "[plugins]\nstrict = 1",
        "[plugins] strict = 1 is an integer; allowed: true or false.",
    ),
    at_load(
        "infinite",
        "[reward]\nweights = [inf]",
        "[reward] weights = [inf] holds a number that is not finite",
    ),
    at_load(
        "temperature zero",
        "[training]\ntemperature = 0",
        "[training] temperature = 0 is out of range; allowed: a number above 0.",
    ),
    at_load(
        "seed too large",
        "[training]\nseed = 4294967296",
        "allowed: an integer of at least -1 and at most 2**32 - 1.",
    ),
    at_load(
        "closed set",
        '[loss]\nkl_estimator = "k4"',
        'kl_estimator = "k4" is not one of its values; allowed: "k1", "k2" or "k3"',
    ),
    at_load(
        "open name of a loss", '[loss]\nmode = "pppo"', 'my_module.my_loss; did you mean "ppo"?'
    ),
    at_load("closed set, nearest", '[sepa]\nschedule = "liner"', 'did you mean "linear"?'),
    at_load(
        "open name, plugin form",
        '[reward]\ntype = "mine"',
        "or a dotted plugin path such as my_module.my_reward",
    ),
    at_load(
        "unknown alias",
        '[algorithm]\nuncertainty_kind = "varentropy"',
        'uncertainty_kind = "varentropy" is not known',
    ),
    at_load(
        "list item",
        '[logging]\ntrackers = ["wandbb"]',
        'trackers = ["wandbb"] holds "wandbb"; allowed: a list, each "wandb", "trackio"',
    ),
    at_load(
        "bare gpu",
        '[backend]\ndevices = "gpu"',
        '[backend] devices = "gpu" is not a device; allowed: cpu, mps, gpu:N or cuda:N',
    ),
    at_load("three devices", '[backend]\ndevices = "gpu:0,gpu:1,gpu:2"', "names 3 devices"),
    at_load("one device twice", '[backend]\ndevices = "gpu:0,cuda:0"', "names a device twice"),
    at_load(
        "unknown option",
        "[backend]\noptions = { zmq_prot = 1 }",
        'zmq_prot is not a known option; did you mean "zmq_port"?',
    ),
    at_load(
        "wrong option",
        "[backend]\noptions = { zmq_port = 0 }",
        "zmq_port = 0 is refused; allowed: an integer of at least 1",
    ),
    at_load(
        "loose advantages",
        "[backend]\noptions = { strict_advantages = false }",
        "strict_advantages = false would average",
    ),
    at_load(
        "alias and key",
        "[algorithm]\nentropy_mask_rho = 0.2\nsurprisal_mask_rho = 0.2",
        "entropy_mask_rho is another name of [algorithm]",
    ),
    at_load(
        "grams twice",
        '[logging]\nstrategic_grams = "a"\n[planning]\nstrategic_grams = "b"',
        "[planning] strategic_grams, and the file has both",
    ),
    at_load(
        "gram without a word",
        '[planning]\nstrategic_grams = ["?!"]',
        'holds "?!", a gram without a word',
    ),
    at_load(
        "grams, broken JSON",
        "[planning]\nstrategic_grams = '[\"a\"'",
        "starts like a JSON array and is not valid JSON",
    ),
    at_load(
        "arguments, not JSON",
        '[environment]\nargs = "split=train"',
        'args = "split=train" is not valid JSON',
    ),
    at_load("arguments, no object", '[environment]\nargs = "[1]"', "is JSON, but not an object"),
    at_load(
        "date in a table",
        "[data]\nparams = { day = 2026-01-01 }",
        "holds 2026-01-01, which is a date; write it as a string",
    ),
    at_load(
        "negative beta",
        "[gtpo]\nbeta = -0.1",
        "[gtpo] beta = -0.1 is out of range; allowed: a number of at least 0.",
    ),
    at_load(
        "nucleus of nothing",
        "[training]\ntop_p = 0.0",
        "[training] top_p = 0.0 is out of range; allowed: a number above 0 and at most 1.",
    ),
    at_load(
        "every token",
        "[training]\nmin_p = 1.0",
        "[training] min_p = 1.0 is out of range; allowed: a number of at least 0 and below 1.",
    ),
    at_load(
        "less than no token",
        "[training]\ntop_k = -1",
        "[training] top_k = -1 is out of range; allowed: an integer of at least 0.",
    ),
    at_load(
        "group of one",
        "[training]\ngroup_size = 1",
        '[training] group_size = 1 gives every completion an advantage of 0 with "maxrl"',
    ),
    at_load(
        "custom alone",
        '[reward]\ntype = ["match", "custom"]',
        '[reward] type = "custom" needs custom_module',
    ),
    at_load("jsonl alone", '[data]\nsource = "jsonl"', '[data] source = "jsonl" needs path'),
    at_load(
        "template", '[data]\nprompt_template = "Solve it."', "prompt_template has no {prompt} in it"
    ),
    *(
        at_load(f"mixture {title}", f"[[data.mix]]\n{table}", says)
        for title, table, says in (
            (
                "and a source",
                'source = "lab"\n[data]\nsource = "lab"',
                'source = "lab" does not go with [[data.mix]]',
            ),
            (
                "of an unknown key",
                'source = "lab"\nweigt = 1',
                "which is not a key of a source; did you",
            ),
            (
                "with a sampler of a source",
                'source = "lab"\nsampler = "pools"',
                "[data] sampler holds for all sources",
            ),
            ("of no source", "weight = 1", "[[data.mix]] number 1 names no source of problems"),
            (
                "of two sources in a table",
                'source = "lab"\nenvironment = { provider = "verifiers", id = "a/b" }',
                '[[data.mix]] number 1 has source = "lab" and an environment',
            ),
            (
                "with a reward beside a rubric",
                'environment = { provider = "verifiers", id = "a/b" }\nreward = { type = "math" }',
                "has reward and an environment, which writes its prompts and has its own",
            ),
            (
                "with a reward that is not a table",
                'source = "lab"\nreward = "math"',
                'has reward = "math", and must have a table, such as { type = "math" }',
            ),
            (
                "with a wrong value",
                'source = "lab"\ndifficulty = 0',
                "[[data.mix]] number 1: [data] difficulty = 0 is out of range",
            ),
            (
                "with a wrong reward",
                'source = "lab"\nreward = { type = "judge" }',
                '[[data.mix]] number 1: [reward] type = "judge" needs judge_model',
            ),
            (
                "with a failure rate of a source",
                'source = "lab"\nreward = { max_failure_rate = 1.0 }',
                "sets max_failure_rate, which [reward] sets for the whole run",
            ),
            (
                "below nothing",
                'source = "lab"\nweight = -1',
                "has a weight that is -1, and must be 0 or more",
            ),
            ("by a word", 'source = "lab"\nweight = "a"', "and must be a number or points [step,"),
            (
                "of points that fall",
                'source = "lab"\nweight = [[4, 1.0], [2, 1.0]]',
                "has a weight that needs points [step, value] with rising steps",
            ),
            (
                "without a share",
                'source = "lab"\nweight = [[0, 1.0], [9, 0.0]]',
                "[[data.mix]] has no weight above 0 at step 9",
            ),
            (
                "with a path for a name",
                'source = "lab"\nname = "a/b"',
                'has name = "a/b", and a name is at most 80 letters',
            ),
            (
                "of two of a name",
                'source = "lab"\n[[data.mix]]\nsource = "lab"',
                '[[data.mix]] has two sources called "lab"',
            ),
        )
    ),
    at_load(
        "environment without id",
        '[environment]\nprovider = "verifiers"',
        "needs id, the environment to load",
    ),
    at_load(
        "environment without provider", '[environment]\nid = "a/b"', 'needs provider = "verifiers"'
    ),
    at_load(
        "greedy samples",
        "[evaluation]\nsamples = 4\ntemperature = 0",
        "would be 4 equal completions at temperature = 0",
    ),
    at_load(
        "minibatches",
        "[training]\nminibatches = 200",
        "minibatches = 200 is more than the 128 completions of a step",
    ),
    at_load(
        "icepop bounds",
        "[loss]\ncorrection_low = 9.0",
        "correction_low = 9.0 is above correction_high = 5.0",
    ),
    at_load("dual clip", "[loss]\ndual_clip = 0.5", "dual_clip = 0.5 would clip tokens on policy"),
    at_load(
        "cispo bounds",
        '[loss]\nmode = "cispo"\nclip_low = 2\nclip_high = 1',
        "clip_low = 2.0 is above clip_high = 1.0",
    ),
    at_load(
        "cispo default bound",
        '[loss]\nmode = "cispo"\nclip_low = 5',
        "clip_low = 5.0 is above clip_high = 4.0 (its default)",
    ),
    at_load(
        "k1 as a loss",
        '[loss]\nkl_coef = 0.1\nkl_estimator = "k1"',
        'kl_estimator = "k1" has an expected gradient of 0',
    ),
    at_load(
        "ppo clip",
        '[loss]\nmode = "ppo"\nclip_low = 1',
        "clip_low = 1.0 would clip the ratio at 1 - clip_low",
    ),
    at_load(
        "batch bounds",
        "[backpressure]\nmin_batch_size = 65",
        "min_batch_size = 65 is above max_batch_size = 64",
    ),
    at_load(
        "no turns",
        "[environment]\nmax_turns = 0",
        "max_turns = 0 would end every episode before it starts",
    ),
    at_load("reward twice", '[reward]\ntype = ["match", "match"]', 'names "match" twice'),
    at_load(
        "condition with both",
        '[[campaign.conditions]]\nalgorithm_mode = "dr_grpo"\nadvantage_mode = "grpo"',
        "and a mode that it replaces",
    ),
    at_load(
        "condition, nearest",
        '[[campaign.conditions]]\nadvantage_mode = "grop"\ntransform_mode = "none"',
        'did you mean "grpo"?',
    ),
    at_load(
        "condition and aggregation",
        '[loss]\naggregation = "sum"\n[[campaign.conditions]]\nalgorithm_mode = "grpo_constant"',
        "contradicts",
    ),
    at_load("pass@k", "[evaluation]\nk = [1, 8]", "asks for pass@8 of samples = 1"),
    at_load(
        "grpo_constant",
        '[algorithm]\nalgorithm_mode = "grpo_constant"\n[loss]\naggregation = "sum"',
        'contradicts algorithm_mode = "grpo_constant"',
    ),
    at_load(
        "campaign base",
        '[campaign]\n[algorithm]\nalgorithm_mode = "grpo_none"',
        "in a campaign's base would override every condition",
    ),
    at_load(
        "half a condition",
        '[[campaign.conditions]]\nadvantage_mode = "grpo"',
        "number 1 lacks transform_mode",
    ),
    at_load(
        "both lengths of the supervised stage",
        "[sft]\nsteps = 5\nepochs = 1.0",
        "[sft] steps = 5 and epochs = 1 both say how long the stage is; keep one",
    ),
    at_load(
        "a supervised stage without a length",
        '[sft]\nsource = "traces.jsonl"',
        '[sft] source = "traces.jsonl" needs the length of the stage',
    ),
    at_load(
        "a run without a step",
        "[training]\nmax_steps = 0",
        "[training] max_steps = 0 needs a supervised stage",
    ),
    at_load("seed twice", "[campaign]\nseeds = [1, 1]", "[campaign] seeds names 1 twice"),
    at_load(
        "campaign seed", "[campaign]\nseeds = [-1]", "seeds = [-1] holds a number out of range"
    ),
    at_load("no seeds", "[campaign]\nseeds = []", "[campaign] seeds = [] is empty"),
    at_load("empty list of rewards", "[reward]\ntype = []", "[reward] type = [] is empty"),
    at_load(
        "no quotes", "[model]\nmodel = lab", "(at line 2, column 9); the line is `model = lab`."
    ),
    at_load(
        "key given again", "[training]\nlr = 1.0\nseed = 1\nlr = 2.0\n", "the line is `lr = 2.0`."
    ),
    at_load("end of a text", '[model]\nmodel = """lab', "(at end of document)."),
    at_load("repeated key", "[training]\nlr = 1.0\nlr = 2.0\n", "(at line 3, column"),
    at_load(
        "a paper's name with a letter too many",
        '[algorithm]\nalgorithm_mode = "scalerll"\n',
        'did you mean "scalerl"?',
    ),
    at_load(
        "a task that no source gives",
        '[evaluation]\nsource = ["math500", "aime24"]\n[evaluation.tasks.amc23]\nsamples = 2\n',
        "source gives math500, aime24",
    ),
    at_load(
        "a setting that no task takes",
        '[evaluation]\nsource = "aime24"\n[evaluation.tasks.aime24]\nsample = 2\n',
        "a task takes samples, temperature, max_examples, path",
    ),
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
