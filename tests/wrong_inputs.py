"""Wrong inputs and the sentence that each gets.

A case is run through the command line as a user would, in a folder of its own, by
tests/test_cli_wrong_inputs.py. A case whose sentence comes at loading is checked by
tests/test_config_errors.py, which is cheap.
"""

import contextlib
import io
import os
import shlex
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
    says: str
    """A part of the sentence that must be there."""
    toml: str | None = ""
    """Put over LAB; None writes no file."""
    words: str = "run.toml"
    """The command line."""
    files: dict[str, str] = field(default_factory=dict)
    code: int = 2
    """The exit code."""


REFUSED = {
    '[algorithm]\nalgorithm_mode = "distill"': '"distill" needs a teacher; set teacher to "base", "answer" or the folder of an adapter',
    '[algorithm]\nalgorithm_mode = "distill"\nreference = "gold"\nreference_prompt = "{prompt}"': "[algorithm] teacher_prompt has no {answer}",
    '[data]\nchat_template_args = { strftime_now = "yesterday" }': '[data] chat_template_args: strftime_now = "yesterday" is not a day such as',
    '[algorithm]\nadvantage_mode = "dapo"': 'my_advantage; "dapo" is a value of [algorithm] algorithm_mode.',
    '[loss]\nmode = "grpo"': '"grpo" is a value of [algorithm] algorithm_mode and [algorithm] advantage_mode.',
    "[training]\nlora_rank = 4": "[training] lora_rank is not a key; lora_rank belongs under [model].",
    "lr = 1.0": "lr = 1.0 stands outside of a section; it belongs under [training].",
    "training = 3": "[training] is a section, and here it is 3.",
    '[training]\nbatch_size = "8"': '[training] batch_size = "8" is a string; allowed: an integer of at least 1 and at most 1000000.',
    "[training]\ngroup_size = 4.5": "[training] group_size = 4.5 is a number with a fraction; allowed:",
    "[training]\nmax_steps = 1e3": "[training] max_steps = 1000.0 is a float; write 1000; allowed:",
    '[logging]\nlog_dir = "logs/a\\nb"': r'[logging] log_dir = "logs/a\nb" holds a control character',
    '[inference]\nurl = "http://127.0.0.1:8000/v1/chat/completions"': '/v1/chat/completions" is the address of a request, not of its server; leave /chat/completions out.',
    '[reward]\ntype = "custom"\ncustom_module = "rewards/rew.py"': 'custom_module = "rewards/rew.py" is the name of a file; write its module, "rewards.rew".',
    "[plugins]\nstrict = 1": "[plugins] strict = 1 is an integer; allowed: true or false.",
    "[reward]\nweights = [inf]": "[reward] weights = [inf] holds a number that is not finite",
    "[training]\ntemperature = 0": "[training] temperature = 0 is out of range; allowed: a number above 0.",
    "[training]\nseed = 4294967296": "allowed: an integer of at least -1 and at most 2**32 - 1.",
    '[loss]\nkl_estimator = "k4"': 'kl_estimator = "k4" is not one of its values; allowed: "k1", "k2" or "k3"',
    '[loss]\nmode = "pppo"': 'my_module.my_loss; did you mean "ppo"?',
    '[sepa]\nschedule = "liner"': 'did you mean "linear"?',
    '[reward]\ntype = "mine"': "or a dotted plugin path such as my_module.my_reward",
    '[algorithm]\nuncertainty_kind = "varentropy"': 'uncertainty_kind = "varentropy" is not known',
    '[logging]\ntrackers = ["wandbb"]': 'trackers = ["wandbb"] holds "wandbb"; allowed: a list, each "wandb", "trackio"',
    '[backend]\ndevices = "gpu"': '[backend] devices = "gpu" is not a device; allowed: cpu, mps, gpu:N or cuda:N',
    '[backend]\ndevices = "gpu:0,gpu:1,gpu:2"': "names 3 devices",
    '[backend]\ndevices = "gpu:0,cuda:0"': "names a device twice",
    "[backend]\noptions = { zmq_prot = 1 }": 'zmq_prot is not a known option; did you mean "zmq_port"?',
    "[backend]\noptions = { zmq_port = 0 }": "zmq_port = 0 is refused; allowed: an integer of at least 1",
    "[backend]\noptions = { strict_advantages = false }": "strict_advantages = false would average",
    "[algorithm]\nentropy_mask_rho = 0.2\nsurprisal_mask_rho = 0.2": "entropy_mask_rho is another name of [algorithm]",
    '[logging]\nstrategic_grams = "a"\n[planning]\nstrategic_grams = "b"': "[planning] strategic_grams, and the file has both",
    '[planning]\nstrategic_grams = ["?!"]': 'holds "?!", a gram without a word',
    "[planning]\nstrategic_grams = '[\"a\"'": "starts like a JSON array and is not valid JSON",
    '[environment]\nargs = "split=train"': 'args = "split=train" is not valid JSON',
    '[environment]\nargs = "[1]"': "is JSON, but not an object",
    "[data]\nparams = { day = 2026-01-01 }": "holds 2026-01-01, which is a date; write it as a string",
    "[gtpo]\nbeta = -0.1": "[gtpo] beta = -0.1 is out of range; allowed: a number of at least 0.",
    "[training]\ntop_p = 0.0": "[training] top_p = 0.0 is out of range; allowed: a number above 0 and at most 1.",
    "[training]\nmin_p = 1.0": "[training] min_p = 1.0 is out of range; allowed: a number of at least 0 and below 1.",
    "[training]\ntop_k = -1": "[training] top_k = -1 is out of range; allowed: an integer of at least 0.",
    "[training]\ngroup_size = 1": '[training] group_size = 1 gives every completion an advantage of 0 with "maxrl"',
    '[reward]\ntype = ["match", "custom"]': '[reward] type = "custom" needs custom_module',
    '[data]\nsource = "jsonl"': '[data] source = "jsonl" needs path',
    '[data]\nprompt_template = "Solve it."': "prompt_template has no {prompt} in it",
    '[[data.mix]]\nsource = "lab"\n[data]\nsource = "lab"': 'source = "lab" does not go with [[data.mix]]',
    '[[data.mix]]\nsource = "lab"\nweigt = 1': "which is not a key of a source; did you",
    '[[data.mix]]\nsource = "lab"\nsampler = "pools"': "[data] sampler holds for all sources",
    "[[data.mix]]\nweight = 1": "[[data.mix]] number 1 names no source of problems",
    '[[data.mix]]\nsource = "lab"\nenvironment = { provider = "verifiers", id = "a/b" }': '[[data.mix]] number 1 has source = "lab" and an environment',
    '[[data.mix]]\nenvironment = { provider = "verifiers", id = "a/b" }\nreward = { type = "math" }': "has reward and an environment, which writes its prompts and has its own",
    '[[data.mix]]\nsource = "lab"\nreward = "math"': 'has reward = "math", and must have a table, such as { type = "math" }',
    '[[data.mix]]\nsource = "lab"\ndifficulty = 0': "[[data.mix]] number 1: [data] difficulty = 0 is out of range",
    '[[data.mix]]\nsource = "lab"\nreward = { type = "judge" }': '[[data.mix]] number 1: [reward] type = "judge" needs judge_model',
    '[[data.mix]]\nsource = "lab"\nreward = { max_failure_rate = 1.0 }': "sets max_failure_rate, which [reward] sets for the whole run",
    '[[data.mix]]\nsource = "lab"\nweight = -1': "has a weight that is -1, and must be 0 or more",
    '[[data.mix]]\nsource = "lab"\nweight = "a"': "and must be a number or points [step,",
    '[[data.mix]]\nsource = "lab"\nweight = [[4, 1.0], [2, 1.0]]': "has a weight that needs points [step, value] with rising steps",
    '[[data.mix]]\nsource = "lab"\nweight = [[0, 1.0], [9, 0.0]]': "[[data.mix]] has no weight above 0 at step 9",
    '[[data.mix]]\nsource = "lab"\nname = "a/b"': 'has name = "a/b", and a name is at most 80 letters',
    '[[data.mix]]\nsource = "lab"\n[[data.mix]]\nsource = "lab"': '[[data.mix]] has two sources called "lab"',
    '[environment]\nprovider = "verifiers"': "needs id, the environment to load",
    '[environment]\nid = "a/b"': 'needs provider = "verifiers"',
    "[evaluation]\nsamples = 4\ntemperature = 0": "would be 4 equal completions at temperature = 0",
    "[training]\nminibatches = 200": "minibatches = 200 is more than the 128 completions of a step",
    "[loss]\ncorrection_low = 9.0": "correction_low = 9.0 is above correction_high = 5.0",
    "[loss]\ndual_clip = 0.5": "dual_clip = 0.5 would clip tokens on policy",
    '[loss]\nmode = "cispo"\nclip_low = 2\nclip_high = 1': "clip_low = 2.0 is above clip_high = 1.0",
    '[loss]\nmode = "cispo"\nclip_low = 5': "clip_low = 5.0 is above clip_high = 4.0 (its default)",
    '[loss]\nkl_coef = 0.1\nkl_estimator = "k1"': 'kl_estimator = "k1" has an expected gradient of 0',
    '[loss]\nmode = "ppo"\nclip_low = 1': "clip_low = 1.0 would clip the ratio at 1 - clip_low",
    "[backpressure]\nmin_batch_size = 65": "min_batch_size = 65 is above max_batch_size = 64",
    "[environment]\nmax_turns = 0": "max_turns = 0 would end every episode before it starts",
    '[reward]\ntype = ["match", "match"]': 'names "match" twice',
    '[[campaign.conditions]]\nalgorithm_mode = "dr_grpo"\nadvantage_mode = "grpo"': "and a mode that it replaces",
    '[[campaign.conditions]]\nadvantage_mode = "grop"\ntransform_mode = "none"': 'did you mean "grpo"?',
    '[loss]\naggregation = "sum"\n[[campaign.conditions]]\nalgorithm_mode = "grpo_constant"': "contradicts",
    "[evaluation]\nk = [1, 8]": "asks for pass@8 of samples = 1",
    '[algorithm]\nalgorithm_mode = "grpo_constant"\n[loss]\naggregation = "sum"': 'contradicts algorithm_mode = "grpo_constant"',
    '[campaign]\n[algorithm]\nalgorithm_mode = "grpo_none"': "in a campaign's base would override every condition",
    '[[campaign.conditions]]\nadvantage_mode = "grpo"': "number 1 lacks transform_mode",
    "[sft]\nsteps = 5\nepochs = 1.0": "[sft] steps = 5 and epochs = 1 both say how long the stage is; keep one",
    '[sft]\nsource = "traces.jsonl"': '[sft] source = "traces.jsonl" needs the length of the stage',
    "[training]\nmax_steps = 0": "[training] max_steps = 0 needs a supervised stage",
    "[campaign]\nseeds = [1, 1]": "[campaign] seeds names 1 twice",
    "[campaign]\nseeds = [-1]": "seeds = [-1] holds a number out of range",
    "[campaign]\nseeds = []": "[campaign] seeds = [] is empty",
    "[reward]\ntype = []": "[reward] type = [] is empty",
    "[model]\nmodel = lab": "(at line 2, column 9); the line is `model = lab`.",
    "[training]\nlr = 1.0\nseed = 1\nlr = 2.0\n": "the line is `lr = 2.0`.",
    '[model]\nmodel = """lab': "(at end of document).",
    "[training]\nlr = 1.0\nlr = 2.0\n": "(at line 3, column",
    '[algorithm]\nalgorithm_mode = "scalerll"\n': 'did you mean "scalerl"?',
    '[evaluation]\nsource = ["math500", "aime24"]\n[evaluation.tasks.amc23]\nsamples = 2\n': "source gives math500, aime24",
    '[evaluation]\nsource = "aime24"\n[evaluation.tasks.aime24]\nsample = 2\n': "a task takes samples, temperature, max_examples, path",
    'reward.type = "judge"\nreward.judge_model = 5': "[reward] judge_model = 5 is an integer",
    "campaign = {}\nsqueeze = {compress_to = 4, per_layer = true, output_path = 'out'}": "leave one of them out",
    'evaluation.source = ["lab", "a/sums.jsonl", "b/sums.jsonl"]': 'names the task "sums" twice',
    'data.source = "lab"\nevaluation.source = ["lab", ""]': "is not a source",
    'evaluation = {source = "lab", tasks.lab = {temperature = 0.0, samples = 2}}': "2 equal",
    'evaluation = {source = ["lab", "gsm8k"], k = [4], tasks.lab.samples = 2}': "asks for pass@4",
}
"""Of a configuration alone, the sentence that comes when it is loaded."""

REFUSED_IN_PRINT = {
    "[training\nlr = 1": "is not valid TOML: ",
    "[trainng]\nlr = 1.0": "[trainng] is not a section; did you mean [training]?",
    "[training]\nbatch_sise = 4": "[training] batch_sise is not a key; did you mean batch_size?",
    '[training]\nlr = "fast"': '[training] lr = "fast" is a string; allowed: a number of at least 0.',
    "[sepa]\nsteps = true": "[sepa] steps = true is a boolean; allowed: an integer of at least 0.",
    "[training]\nlr = nan": "[training] lr = nan is not a finite number; allowed: a number of at least 0.",
    '[algorithm]\nadvantage_mode = "maxlr"': 'advantage_mode = "maxlr" is not known; allowed: grpo, maxrl, rloo',
    "[training]\ntop_k = 1": "[training] top_k = 1 makes all completions of a prompt equal",
    "[hicra]\nalpha = 1.5": "[hicra] alpha = 1.5 is out of range; allowed: a number of at least 0 and at most 1.",
    '[algorithm]\ntransform_mode = "gtpo_sepa"\n[sepa]\nsteps = 0': '[sepa] steps = 0 with schedule = "linear" turns SEPA off in',
    '[algorithm]\ntransform_mode = "entropy_mask"': '"entropy_mask" needs surprisal_mask_rho above 0',
    '[loss]\ncorrection = "tis"': '[loss] correction = "tis" needs old_logprobs = "recomputed"',
    "[training]\nkeep_checkpoints = 1": "keep_checkpoints = 1 leaves no second checkpoint",
    '[reward]\ntype = "judge"': '[reward] type = "judge" needs judge_model',
    '[backend]\nprime_rl_transport = "zmq"': "is now in [backend.options] transport; run `retrain migrate-config",
    '[reward]\ntype = ["match", "math"]\nweights = [1.0]': "weights has 1 numbers and type has 2 rewards",
    '[[campaign.conditions]]\nadvantage_mode = "grpo"\nlrr = 1.0': "lrr is not a key of a condition",
    '[campaign]\nconditions = [{advantage_mode = "a.f", transform_mode = "none"}, {advantage_mode = "b.f", transform_mode = "none"}]': 'are both called "f+none"',
}

AT_LOAD = [*REFUSED.items(), *REFUSED_IN_PRINT.items()]

AT_START = {
    "[training]\nbatch_size = 0": "at least 1",
    '[loss]\naggregation = "tokenmean"': "token_mean",
    "[training]\nbatch_size = 1000000000": "at most 1000000",
    '[squeeze]\nadapter_path = "~nosuchuser/adapter"': "no user",
    '[backend]\nbackend = "tinker"\n[algorithm]\nuncertainty_kind = "shannon_entropy"': "shannon_entropy",
    '[backend]\nbackend = "prime_rl"\n[algorithm]\nuncertainty_kind = "shannon_entropy"': "shannon_entropy",
    '[inference]\nattention_kernel = "flash"\n[backend]\ndevices = "cpu"': "flash",
    '[data]\nsource = "gms8k"': "gsm8k",
    "[data]\ndifficulty = 9": "difficulty",
    '[reward]\ntype = "custom"\ncustom_module = "no_such_reward"': "no_such_reward",
    '[algorithm]\nadvantage_mode = "no_such_module.advantage"': "no_such_module",
    "[algorithm]\nadvantage_params = { scale = 2.0 }": "scale",
    '[squeeze]\nadapter_path = "old"': "no adapter_config.json",
    '[campaign]\n[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "none"\nloss.mode = "pp"': "number 1: [loss] mode",
    '[data]\nsource = "rows.jsonl"': '[data] source = "rows.jsonl" does not exist in <folder>, the current folder, or beside',
    **{
        f'[algorithm]\ntransform_mode = "gtpo"\nuncertainty_kind = "shannon_entropy"\n[inference]\nengine = "{engine}"\nurl = "http://127.0.0.1:1"': "shannon_entropy"
        for engine in ("vllm", "sglang", "max", "mlx", "openai")
    },
    f"[training]\nmax_steps = {'9' * 5000}": "4,300 digits",
    f"[algorithm]\nadvantage_params = {'{a=' * 400}1{'}' * 400}": "nests deeper",
}
"""What a file over LAB is answered by the command line."""

COMMANDS = {
    "train run.toml": "`retrain run.toml` trains",
    "run.toml --batchsize 4": "--batch-size",
    "run.toml --learning-rate 1e-4": "--lr",
    f"run.toml --log-dir {'a' * 300}": "255 bytes",
    "run.toml --lr": "--lr",
    "run.toml --max-steps many": "--max-steps",
    "run.toml --max-steps 1e3": "flag --max-steps: [training] max_steps = 1000.0 is a float; write 1000; allowed:",
    "run.toml --evaluation-at-start False": 'flag --evaluation-at-start: [evaluation] at_start = "False" is a string; allowed: true or',
    "status absent": "is not a folder",
    "power --effect 0.02": "--sd",
    "power --effect 0 --sd 0.02": "--effect 0",
}
"""What a command line is answered beside LAB as run.toml."""

WITHOUT_A_FILE = {
    "": "retrain init",
    "absent.toml": "does not exist",
    "inti": "retrain init",
    "status --formatt json": "--format",
    "status --format xml": "'--format' / '--json': 'xml' is not one of 'text', 'json'. An example",
}

MODULE = "plugins_for_test.py"
OLD = '[logging]\nlog_dir = "old"'
ROWS = '[data]\nsource = "rows.jsonl"'
ROW = '{"prompt": "1+1=?", "answer": "2"}\n'
NO_RUN = {"old/notes.txt": ""}
RUN = {"old/.retrain.json": '{"kind": "run", "format": 1}'}
CAMPAIGN = {"old/.retrain.json": '{"kind": "campaign", "format": 1}'}
CHECKPOINT = "old/checkpoints/step_000020"
CUSTOM = '[reward]\ntype = "custom"\ncustom_module = "plugins_for_test"'
RAISES = "def score(response, reference):\n    raise RuntimeError('judge is down')\n"
ADAPTER = '[squeeze]\nadapter_path = "old"'
LORA = '{"peft_type": "LORA", "r": 8, "lora_alpha": 16}'

CASES = [
    *(Case(says, toml) for toml, says in (REFUSED_IN_PRINT | AT_START).items()),
    *(Case(says, words=words) for words, says in COMMANDS.items()),
    *(Case(says, None, words) for words, says in WITHOUT_A_FILE.items()),
    Case("gpu:7", '[backend]\ndevices = "gpu:7"', code=3),
    Case("no/such-model", '[model]\nmodel = "no/such-model"', code=3),
    # -- data --------------------------------------------------------------------------------------
    Case("no usable training row", ROWS, files={"rows.jsonl": '{"prompt": "1+1=?"}\n'}),
    Case('"./sums"', '[data]\nsource = "sums"', files={"sums/train.jsonl": ROW}),
    Case('prompt_column = "q', ROWS, files={"rows.jsonl": '{"question": "1+1=?"}\n'}),
    Case(
        "one JSON object per line",
        ROWS.replace("jsonl", "csv"),
        files={"rows.csv": "prompt,answer\n1+1=?,2\n"},
    ),
    Case("answer_column", f'{ROWS}\nanswer_column = "gold"', files={"rows.jsonl": ROW}),
    Case("held-out", f"{ROWS}\n[evaluation]\nat_end = true", files={"rows.jsonl": ROW * 8}),
    Case(
        "[evaluation] source names too",
        f'{ROWS}\n[evaluation]\nat_end = true\nsource = "rows.jsonl"',
        files={"rows.jsonl": ROW * 8},
    ),
    # -- plugins -----------------------------------------------------------------------------------
    Case("score", CUSTOM, files={MODULE: "x = 1\n"}),
    Case(
        "judge is down",
        f"{CUSTOM}\n[training]\nbatch_size = 8\nmax_steps = 3",
        files={MODULE: RAISES},
        code=1,
    ),
    Case(
        "plugins_for_test.one",
        '[algorithm]\nadvantage_mode = "plugins_for_test.one"',
        files={MODULE: "def one(rewards):\n    return [1.0]\n"},
    ),
    Case(
        "plugins_for_test.make",
        '[algorithm]\ntransform_mode = "plugins_for_test.make"',
        files={MODULE: "def make():\n    return 3\n"},
    ),
    Case(
        "/json.py, since it has a module json of its own. Rename the file.",
        '[algorithm]\nadvantage_mode = "json.centered"',
        files={"json.py": "def centered(rewards):\n    return rewards\n"},
    ),
    # -- folders -----------------------------------------------------------------------------------
    Case("holds a list", OLD, files={"old/.retrain.json": "[]"}, code=1),
    Case("--overwrite", OLD, files=RUN | {"old/metrics.jsonl": ""}),
    Case("was not made by retrain", OLD, "run.toml --overwrite", {"old/metrics.jsonl": ""}),
    Case("holds no run", "", "run.toml --resume old", NO_RUN),
    Case(
        "it is a part of the run ",
        "",
        f"run.toml --resume {CHECKPOINT}",
        RUN | {f"{CHECKPOINT}/adapter_config.json": "{}"},
    ),
    Case("retrain old/config.toml --resume old", None, "old", RUN),
    Case("retrain FILE --resume old", None, "--resume old", RUN),
    Case("name a TOML file", None, "old", NO_RUN),
    Case("leave one", "", "run.toml --resume old --overwrite", RUN),
    Case("--log-dir", "", "run.toml --resume old --log-dir new", RUN),
    Case("holds no run", "", "eval old", NO_RUN),
    Case("only LORA", ADAPTER, files={"old/adapter_config.json": '{"peft_type": "LOHA"}'}),
    Case(
        "safetensors",
        ADAPTER,
        files={"old/adapter_config.json": LORA, "old/adapter_model.bin": ""},
    ),
    # -- campaigns and what is shown of them -------------------------------------------------------
    Case("--overwrite", "[campaign]", "run.toml --overwrite"),
    Case("is not a campaign", "[campaign]", "run.toml --resume absent"),
    Case("holds a campaign", "", "run.toml --log-dir old", CAMPAIGN),
    Case("Its figures go next to it as svg and png", "", "report old --output x.svg", NO_RUN),
    Case("--baseline", "", "compare old", NO_RUN),
    Case("holds no run", "", "compare old --baseline old", NO_RUN),
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
            code = retrain(shlex.split(case.words))
        for module in set(sys.modules) - modules:
            if module.startswith("plugins_for_test"):
                del sys.modules[module]
        said = [
            line.removeprefix("retrain: ")
            for line in errors.getvalue().splitlines()
            if line.startswith("retrain: ")
        ]
        return code, [line.replace(name, "<folder>") for line in said]
