"""Wrong inputs and the sentence that each gets.

A case is run through the command line as a user would, in a folder of its own, by
tests/test_cli_wrong_inputs.py. What only has to be loaded is checked by tests/test_config_errors.py,
which is cheap.
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
    says: str
    """A part of the sentence that must be there."""
    toml: str | None = ""
    """Put over LAB; None writes no file."""
    argv: str = "run.toml"
    files: dict[str, str] = field(default_factory=dict)
    code: int = 2
    """The exit code."""


ROW = '{"prompt": "1+1=?", "answer": "2"}\n'
MODULE = "plugins_for_test.py"
CAMPAIGN_MARK = '{"kind": "campaign", "format": 1}'
RUN_MARK = '{"kind": "run", "format": 1}'
A_RUN, NOTES = {"old/.retrain.json": RUN_MARK}, {"old/notes.txt": ""}
CONDITION = """[campaign]
[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
"""

CASES = [
    # -- configuration
    Case("retrain init", None, ""),
    Case("does not exist", None, "absent.toml"),
    Case("retrain init", None, "inti"),
    Case("`retrain run.toml` trains", argv="train run.toml"),
    Case("--format", None, "status --formatt json"),
    Case(
        "'--format' / '--json': 'xml' is not one of 'text', 'json'. An example",
        None,
        "status --format xml",
    ),
    Case("is not valid TOML: ", "[training\nlr = 1"),
    Case("[trainng] is not a section; did you mean [training]?", "trainng.lr = 1.0"),
    Case("[training] batch_sise is not a key; did you mean batch_size?", "training.batch_sise = 4"),
    Case(
        '[training] lr = "fast" is a string; allowed: a number of at least 0.',
        'training.lr = "fast"',
    ),
    Case(
        "[sepa] steps = true is a boolean; allowed: an integer of at least 0.",
        "sepa.steps = true",
    ),
    Case("at least 1", "training.batch_size = 0"),
    Case(
        "[training] lr = nan is not a finite number; allowed: a number of at least 0.",
        "[training]\nlr = nan",
    ),
    Case("token_mean", 'loss.aggregation = "tokenmean"'),
    Case(
        'advantage_mode = "maxlr" is not known; allowed: grpo, maxrl, rloo',
        'algorithm.advantage_mode = "maxlr"',
    ),
    Case("[training] top_k = 1 makes all completions of a prompt equal", "training.top_k = 1"),
    Case(
        "[hicra] alpha = 1.5 is out of range; allowed: a number of at least 0 and at most 1.",
        "hicra.alpha = 1.5",
    ),
    Case(
        '[sepa] steps = 0 with schedule = "linear" turns SEPA off in',
        'algorithm.transform_mode = "gtpo_sepa"\nsepa.steps = 0',
    ),
    Case(
        '"entropy_mask" needs surprisal_mask_rho above 0',
        'algorithm.transform_mode = "entropy_mask"',
    ),
    Case('[loss] correction = "tis" needs old_logprobs = "recomputed"', 'loss.correction = "tis"'),
    Case("keep_checkpoints = 1 leaves no second checkpoint", "training.keep_checkpoints = 1"),
    Case('[reward] type = "judge" needs judge_model', 'reward.type = "judge"'),
    Case(
        "is now in [backend.options] transport; run `retrain migrate-config",
        'backend.prime_rl_transport = "zmq"',
    ),
    Case("--batch-size", argv="run.toml --batchsize 4"),
    Case("--lr", argv="run.toml --learning-rate 1e-4"),
    Case("4,300 digits", f"[training]\nmax_steps = {'9' * 5000}"),
    Case("nests deeper", f"[algorithm]\nadvantage_params = {'{a=' * 400}1{'}' * 400}"),
    Case("255 bytes", argv=f"run.toml --log-dir {'a' * 300}"),
    Case("at most 1000000", "training.batch_size = 1000000000"),
    Case("no user", 'squeeze.adapter_path = "~nosuchuser/adapter"'),
    Case("holds a list", 'logging.log_dir = "old"', files={"old/.retrain.json": "[]"}, code=1),
    Case("--lr", argv="run.toml --lr"),
    Case("--max-steps", argv="run.toml --max-steps many"),
    Case(
        "shannon_entropy",
        'backend.backend = "tinker"\nalgorithm.uncertainty_kind = "shannon_entropy"',
    ),
    # -- machine
    Case("gpu:7", 'backend.devices = "gpu:7"', code=3),
    Case("flash", 'inference.attention_kernel = "flash"\nbackend.devices = "cpu"'),
    Case("no/such-model", 'model.model = "no/such-model"', code=3),
    # -- data
    Case("rows.jsonl", 'data.source = "rows.jsonl"'),
    Case(
        "no usable training row",
        'data.source = "rows.jsonl"',
        files={"rows.jsonl": '{"prompt": "1+1=?"}\n'},
    ),
    Case('"./sums"', 'data.source = "sums"', files={"sums/train.jsonl": ROW}),
    Case(
        'prompt_column = "q',
        'data.source = "q.jsonl"',
        files={"q.jsonl": '{"question": "1+1=?"}\n'},
    ),
    Case(
        "one JSON object per line",
        'data.source = "rows.csv"',
        files={"rows.csv": "prompt,answer\n1+1=?,2\n"},
    ),
    Case(
        "answer_column",
        '[data]\nsource = "rows.jsonl"\nanswer_column = "gold"',
        files={"rows.jsonl": ROW},
    ),
    Case("gsm8k", 'data.source = "gms8k"'),
    Case(
        "held-out",
        'data.source = "rows.jsonl"\nevaluation.at_end = true',
        files={"rows.jsonl": ROW * 8},
    ),
    Case("difficulty", "data.difficulty = 9"),
    # -- rewards
    Case("no_such_reward", '[reward]\ntype = "custom"\ncustom_module = "no_such_reward"'),
    Case(
        "/json.py, since it has a module json of its own. Rename the file.",
        'algorithm.advantage_mode = "json.centered"',
        files={"json.py": "def centered(rewards):\n    return rewards\n"},
    ),
    Case(
        "score",
        '[reward]\ntype = "custom"\ncustom_module = "plugins_for_test"',
        files={MODULE: "x = 1\n"},
    ),
    Case(
        "judge is down",
        '[reward]\ntype = "custom"\ncustom_module = "plugins_for_test"\n[training]\nbatch_size = 8\nmax_steps = 3',
        files={
            MODULE: "def score(response, reference):\n    raise RuntimeError('judge is down')\n"
        },
        code=1,
    ),
    Case(
        "weights has 1 numbers and type has 2 rewards",
        '[reward]\ntype = ["match", "math"]\nweights = [1.0]',
    ),
    # -- plugins
    Case("no_such_module", 'algorithm.advantage_mode = "no_such_module.advantage"'),
    Case(
        "plugins_for_test.one",
        'algorithm.advantage_mode = "plugins_for_test.one"',
        files={MODULE: "def one(rewards):\n    return [1.0]\n"},
    ),
    Case(
        "plugins_for_test.make",
        'algorithm.transform_mode = "plugins_for_test.make"',
        files={MODULE: "def make():\n    return 3\n"},
    ),
    Case("scale", "algorithm.advantage_params = { scale = 2.0 }"),
    # -- folders
    Case(
        "--overwrite",
        'logging.log_dir = "old"',
        files={"old/.retrain.json": RUN_MARK, "old/metrics.jsonl": ""},
    ),
    Case(
        "was not made by retrain",
        'logging.log_dir = "old"',
        "run.toml --overwrite",
        files={"old/metrics.jsonl": ""},
    ),
    Case("holds no run", argv="run.toml --resume old", files=NOTES),
    Case(
        "it is a part of the run ",
        argv="run.toml --resume old/checkpoints/step_000020",
        files={
            "old/.retrain.json": RUN_MARK,
            "old/checkpoints/step_000020/adapter_config.json": "{}",
        },
    ),
    Case("retrain old/config.toml --resume old", None, "old", files=A_RUN),
    Case("retrain FILE --resume old", None, "--resume old", files=A_RUN),
    Case("name a TOML file", None, "old", files=NOTES),
    Case("leave one", argv="run.toml --resume old --overwrite", files=A_RUN),
    Case("--log-dir", argv="run.toml --resume old --log-dir new", files=A_RUN),
    Case("holds no run", argv="eval old", files=NOTES),
    # -- squeezing and looking
    Case("no adapter_config.json", 'squeeze.adapter_path = "old"'),
    Case(
        "only LORA",
        'squeeze.adapter_path = "old"',
        files={"old/adapter_config.json": '{"peft_type": "LOHA"}'},
    ),
    Case(
        "safetensors",
        'squeeze.adapter_path = "old"',
        files={
            "old/adapter_config.json": '{"peft_type": "LORA", "r": 8, "lora_alpha": 16}',
            "old/adapter_model.bin": "",
        },
    ),
    Case("is not a folder", argv="status absent"),
    # -- campaigns
    Case(
        "lrr is not a key of a condition",
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\nlrr = 1.0',
    ),
    Case("number 1: [loss] mode", CONDITION + 'loss.mode = "pp"'),
    Case(
        'are both called "f+none"',
        'campaign.conditions = [{advantage_mode = "a.f", transform_mode = "none"}, {advantage_mode = "b.f", transform_mode = "none"}]',
    ),
    Case("--overwrite", "[campaign]", "run.toml --overwrite"),
    Case("is not a campaign", "[campaign]", "run.toml --resume absent"),
    Case(
        "holds a campaign",
        argv="run.toml --log-dir old",
        files={"old/.retrain.json": CAMPAIGN_MARK},
    ),
    # -- a report
    Case("Its figures go next to it as svg and png", argv="report old --output x.svg", files=NOTES),
    # -- comparing
    Case("--baseline", argv="compare old", files=NOTES),
    Case("holds no run", argv="compare old --baseline old", files=NOTES),
    Case(
        "flag --max-steps: [training] max_steps = 1000.0 is a float; write 1000; allowed:",
        argv="run.toml --max-steps 1e3",
    ),
    Case(
        'flag --evaluation-at-start: [evaluation] at_start = "False" is a string; allowed: true or',
        argv="run.toml --evaluation-at-start False",
    ),
    Case(
        '[data] source = "rows.jsonl" does not exist in <folder>, the current folder, or beside',
        'data.source = "rows.jsonl"',
    ),
    Case("--sd", argv="power --effect 0.02"),
    Case("--effect 0", argv="power --effect 0 --sd 0.02"),
]
"""Run through the command line."""

AT_LOAD = [
    (
        'algorithm.algorithm_mode = "distill"',
        '"distill" needs a teacher; set teacher to "base", "answer" or the folder of an adapter',
    ),
    (
        '[algorithm]\nalgorithm_mode = "distill"\nreference = "gold"\nreference_prompt = "{prompt}"',
        "[algorithm] teacher_prompt has no {answer}",
    ),
    (
        'data.chat_template_args = { strftime_now = "yesterday" }',
        '[data] chat_template_args: strftime_now = "yesterday" is not a day such as',
    ),
    (
        '[schedule]\n"model.lora_rank" = [[0, 4], [10, 8]]',
        '"model.lora_rank" is not a key that a schedule can move. It can move ',
    ),
    (
        '[schedule]\n"loss.kl_coef" = [[10, 0.1], [0, 0.0]]',
        '"loss.kl_coef" needs points [step, value] with rising steps',
    ),
    (
        '[training]\nlr_schedule = "linear"\n[schedule]\n"training.lr" = [[0, 1e-3]]',
        '"training.lr" has a schedule already',
    ),
    (
        'algorithm.advantage_mode = "dapo"',
        'my_advantage; "dapo" is a value of [algorithm] algorithm_mode.',
    ),
    (
        'loss.mode = "grpo"',
        '"grpo" is a value of [algorithm] algorithm_mode and [algorithm] advantage_mode.',
    ),
    (
        "training.lora_rank = 4",
        "[training] lora_rank is not a key; lora_rank belongs under [model].",
    ),
    ("lr = 1.0", "lr = 1.0 stands outside of a section; it belongs under [training]."),
    ("training = 3", "[training] is a section, and here it is 3."),
    (
        'training.batch_size = "8"',
        '[training] batch_size = "8" is a string; allowed: an integer of at least 1 and at most 1000000.',
    ),
    (
        "training.group_size = 4.5",
        "[training] group_size = 4.5 is a number with a fraction; allowed:",
    ),
    ("training.max_steps = 1e3", "[training] max_steps = 1000.0 is a float; write 1000; allowed:"),
    (
        'logging.log_dir = "logs/a\\nb"',
        '[logging] log_dir = "logs/a\\nb" holds a control character',
    ),
    (
        'inference.url = "http://127.0.0.1:8000/v1/chat/completions"',
        '/v1/chat/completions" is the address of a request, not of its server; leave /chat/completions out.',
    ),
    (
        '[reward]\ntype = "custom"\ncustom_module = "rewards/rew.py"',
        'custom_module = "rewards/rew.py" is the name of a file; write its module, "rewards.rew".',
    ),
    ("plugins.strict = 1", "[plugins] strict = 1 is an integer; allowed: true or false."),
    ("reward.weights = [inf]", "[reward] weights = [inf] holds a number that is not finite"),
    (
        "training.temperature = 0",
        "[training] temperature = 0 is out of range; allowed: a number above 0.",
    ),
    ("training.seed = 4294967296", "allowed: an integer of at least -1 and at most 2**32 - 1."),
    (
        'loss.kl_estimator = "k4"',
        'kl_estimator = "k4" is not one of its values; allowed: "k1", "k2" or "k3"',
    ),
    ('loss.mode = "pppo"', 'my_module.my_loss; did you mean "ppo"?'),
    ('sepa.schedule = "liner"', 'did you mean "linear"?'),
    ('reward.type = "mine"', "or a dotted plugin path such as my_module.my_reward"),
    ('algorithm.uncertainty_kind = "varentropy"', 'uncertainty_kind = "varentropy" is not known'),
    (
        'logging.trackers = ["wandbb"]',
        'trackers = ["wandbb"] holds "wandbb"; allowed: a list, each "wandb", "trackio"',
    ),
    (
        'backend.devices = "gpu"',
        '[backend] devices = "gpu" is not a device; allowed: cpu, mps, gpu:N or cuda:N',
    ),
    ('backend.devices = "gpu:0,gpu:1,gpu:2"', "names 3 devices"),
    ('backend.devices = "gpu:0,cuda:0"', "names a device twice"),
    (
        "backend.options = { zmq_prot = 1 }",
        'zmq_prot is not a known option; did you mean "zmq_port"?',
    ),
    (
        "backend.options = { zmq_port = 0 }",
        "zmq_port = 0 is refused; allowed: an integer of at least 1",
    ),
    ("backend.options = { strict_advantages = false }", "strict_advantages = false would average"),
    (
        "[algorithm]\nentropy_mask_rho = 0.2\nsurprisal_mask_rho = 0.2",
        "entropy_mask_rho is another name of [algorithm]",
    ),
    (
        'logging.strategic_grams = "a"\nplanning.strategic_grams = "b"',
        "[planning] strategic_grams, and the file has both",
    ),
    ('planning.strategic_grams = ["?!"]', 'holds "?!", a gram without a word'),
    ("planning.strategic_grams = '[\"a\"'", "starts like a JSON array and is not valid JSON"),
    ('environment.args = "split=train"', 'args = "split=train" is not valid JSON'),
    ('environment.args = "[1]"', "is JSON, but not an object"),
    (
        "data.params = { day = 2026-01-01 }",
        "holds 2026-01-01, which is a date; write it as a string",
    ),
    ("gtpo.beta = -0.1", "[gtpo] beta = -0.1 is out of range; allowed: a number of at least 0."),
    (
        "training.top_p = 0.0",
        "[training] top_p = 0.0 is out of range; allowed: a number above 0 and at most 1.",
    ),
    (
        "training.min_p = 1.0",
        "[training] min_p = 1.0 is out of range; allowed: a number of at least 0 and below 1.",
    ),
    (
        "training.top_k = -1",
        "[training] top_k = -1 is out of range; allowed: an integer of at least 0.",
    ),
    (
        "training.group_size = 1",
        '[training] group_size = 1 gives every completion an advantage of 0 with "maxrl"',
    ),
    ('reward.type = ["match", "custom"]', '[reward] type = "custom" needs custom_module'),
    ('data.source = "jsonl"', '[data] source = "jsonl" needs path'),
    ('data.prompt_template = "Solve it."', "prompt_template has no {prompt} in it"),
    (
        '[[data.mix]]\nsource = "lab"\n[data]\nsource = "lab"',
        'source = "lab" does not go with [[data.mix]]',
    ),
    ('[[data.mix]]\nsource = "lab"\nweigt = 1', "which is not a key of a source; did you"),
    ('[[data.mix]]\nsource = "lab"\nsampler = "pools"', "[data] sampler holds for all sources"),
    ("[[data.mix]]\nweight = 1", "[[data.mix]] number 1 names no source of problems"),
    (
        '[[data.mix]]\nsource = "lab"\nenvironment = { provider = "verifiers", id = "a/b" }',
        '[[data.mix]] number 1 has source = "lab" and an environment',
    ),
    (
        '[[data.mix]]\nenvironment = { provider = "verifiers", id = "a/b" }\nreward = { type = "math" }',
        "has reward and an environment, which writes its prompts and has its own",
    ),
    (
        '[[data.mix]]\nsource = "lab"\nreward = "math"',
        'has reward = "math", and must have a table, such as { type = "math" }',
    ),
    (
        '[[data.mix]]\nsource = "lab"\ndifficulty = 0',
        "[[data.mix]] number 1: [data] difficulty = 0 is out of range",
    ),
    (
        '[[data.mix]]\nsource = "lab"\nreward = { type = "judge" }',
        '[[data.mix]] number 1: [reward] type = "judge" needs judge_model',
    ),
    (
        '[[data.mix]]\nsource = "lab"\nreward = { max_failure_rate = 1.0 }',
        "sets max_failure_rate, which [reward] sets for the whole run",
    ),
    ('[[data.mix]]\nsource = "lab"\nweight = -1', "has a weight that is -1, and must be 0 or more"),
    ('[[data.mix]]\nsource = "lab"\nweight = "a"', "and must be a number or points [step,"),
    (
        '[[data.mix]]\nsource = "lab"\nweight = [[4, 1.0], [2, 1.0]]',
        "has a weight that needs points [step, value] with rising steps",
    ),
    (
        '[[data.mix]]\nsource = "lab"\nweight = [[0, 1.0], [9, 0.0]]',
        "[[data.mix]] has no weight above 0 at step 9",
    ),
    (
        '[[data.mix]]\nsource = "lab"\nname = "a/b"',
        'has name = "a/b", and a name is at most 80 letters',
    ),
    (
        '[[data.mix]]\nsource = "lab"\n[[data.mix]]\nsource = "lab"',
        '[[data.mix]] has two sources called "lab"',
    ),
    ('environment.provider = "verifiers"', "needs id, the environment to load"),
    ('environment.id = "a/b"', 'needs provider = "verifiers"'),
    (
        "[evaluation]\nsamples = 4\ntemperature = 0",
        "would be 4 equal completions at temperature = 0",
    ),
    ("training.minibatches = 200", "minibatches = 200 is more than the 128 completions of a step"),
    ("loss.correction_low = 9.0", "correction_low = 9.0 is above correction_high = 5.0"),
    ("loss.dual_clip = 0.5", "dual_clip = 0.5 would clip tokens on policy"),
    (
        '[loss]\nmode = "cispo"\nclip_low = 2\nclip_high = 1',
        "clip_low = 2.0 is above clip_high = 1.0",
    ),
    (
        '[loss]\nmode = "cispo"\nclip_low = 5',
        "clip_low = 5.0 is above clip_high = 4.0 (its default)",
    ),
    (
        '[loss]\nkl_coef = 0.1\nkl_estimator = "k1"',
        'kl_estimator = "k1" has an expected gradient of 0',
    ),
    ('[loss]\nmode = "ppo"\nclip_low = 1', "clip_low = 1.0 would clip the ratio at 1 - clip_low"),
    ("backpressure.min_batch_size = 65", "min_batch_size = 65 is above max_batch_size = 64"),
    ("environment.max_turns = 0", "max_turns = 0 would end every episode before it starts"),
    ('reward.type = ["match", "match"]', 'names "match" twice'),
    (
        '[[campaign.conditions]]\nalgorithm_mode = "dr_grpo"\nadvantage_mode = "grpo"',
        "and a mode that it replaces",
    ),
    (
        '[[campaign.conditions]]\nadvantage_mode = "grop"\ntransform_mode = "none"',
        'did you mean "grpo"?',
    ),
    (
        '[loss]\naggregation = "sum"\n[[campaign.conditions]]\nalgorithm_mode = "grpo_constant"',
        "contradicts",
    ),
    ("evaluation.k = [1, 8]", "asks for pass@8 of samples = 1"),
    (
        'algorithm.algorithm_mode = "grpo_constant"\nloss.aggregation = "sum"',
        'contradicts algorithm_mode = "grpo_constant"',
    ),
    (
        '[campaign]\n[algorithm]\nalgorithm_mode = "grpo_none"',
        "in a campaign's base would override every condition",
    ),
    ('[[campaign.conditions]]\nadvantage_mode = "grpo"', "number 1 lacks transform_mode"),
    (
        "[sft]\nsteps = 5\nepochs = 1.0",
        "[sft] steps = 5 and epochs = 1 both say how long the stage is; keep one",
    ),
    ('sft.source = "traces.jsonl"', '[sft] source = "traces.jsonl" needs the length of the stage'),
    ("training.max_steps = 0", "[training] max_steps = 0 needs a supervised stage"),
    ("campaign.seeds = [1, 1]", "[campaign] seeds names 1 twice"),
    ("campaign.seeds = [-1]", "seeds = [-1] holds a number out of range"),
    ("campaign.seeds = []", "[campaign] seeds = [] is empty"),
    ("reward.type = []", "[reward] type = [] is empty"),
    ("[model]\nmodel = lab", "(at line 2, column 9); the line is `model = lab`."),
    ("[training]\nlr = 1.0\nseed = 1\nlr = 2.0\n", "the line is `lr = 2.0`."),
    ('model.model = """lab', "(at end of document)."),
    ("[training]\nlr = 1.0\nlr = 2.0\n", "(at line 3, column"),
    ('algorithm.algorithm_mode = "scalerll"', 'did you mean "scalerl"?'),
    (
        '[evaluation]\nsource = ["math500", "aime24"]\n[evaluation.tasks.amc23]\nsamples = 2\n',
        "source gives math500, aime24",
    ),
    (
        '[evaluation]\nsource = "aime24"\n[evaluation.tasks.aime24]\nsample = 2\n',
        "a task takes samples, temperature, max_examples, path",
    ),
    ('reward.type = "judge"\nreward.judge_model = 5', "[reward] judge_model = 5 is an integer"),
    (
        "campaign = {}\nsqueeze = {compress_to = 4, per_layer = true, output_path = 'out'}",
        "leave one of them out",
    ),
    (
        'evaluation.source = ["lab", "a/sums.jsonl", "b/sums.jsonl"]',
        'names the task "sums" twice',
    ),
    ('data.source = "lab"\nevaluation.source = ["lab", ""]', "is not a source"),
    (
        'evaluation = {source = "lab", tasks.lab = {temperature = 0.0, samples = 2}}',
        "2 equal",
    ),
    (
        'evaluation = {source = ["lab", "gsm8k"], k = [4], tasks.lab.samples = 2}',
        "asks for pass@4",
    ),
]
"""A configuration, and a part of the one sentence that comes when it is loaded."""


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
            code = retrain(case.argv.split())
        for module in set(sys.modules) - modules:
            if module.startswith("plugins_for_test"):
                del sys.modules[module]
        said = [
            line.removeprefix("retrain: ")
            for line in errors.getvalue().splitlines()
            if line.startswith("retrain: ")
        ]
        return code, [line.replace(name, "<folder>") for line in said]
