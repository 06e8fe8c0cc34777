"""The text of `retrain --help`, and an example of each command. Plain text and no imports, so that
it answers at once.
"""

COMMANDS = {
    "init": "write a configuration to start from",
    "migrate-config": "rewrite the removed keys of an older configuration",
    "explain": "what a configuration would do; memory, time and cost",
    "status": "progress of runs and campaigns",
    "eval": "held-out pass@1 and pass@k of a checkpoint or base model",
    "export": "the adapter, or a merged model, for peft and vLLM",
    "compare": "conditions across seeds: differences, intervals, verdicts",
    "diff": "where two runs first differ, and why",
    "verify": "recompute steps and compare them byte for byte",
    "report": "one HTML page of a run or campaign",
    "inspect": "the credit of every token of a step, in color",
    "audit": "false negatives and false positives of a reward",
    "power": "how many seeds it takes to find a difference",
    "xray": "which objective an advantage optimizes, before any run",
    "man": "the manual, whole or by topic",
    "help": "the short page, or what a key, section or command does",
    "serve": "the command that starts an inference server",
    "doctor": "what this machine has and lacks, and what to do",
    "backends": "engines and backends: what each can do, and its version",
    "plugins": "what every key that takes a plugin can be",
    "init-plugin": "write a plugin, and a run of the lab that uses it",
    "version": "print the version",
}

MAX_WIDTH = 110
"""Columns of help pages on a wide terminal."""

EXAMPLES = {
    "init": "retrain init --template lab --output lab.toml",
    "migrate-config": "retrain migrate-config retrain.toml --check",
    "explain": "retrain explain examples/lab.toml --probe --price-per-hour 2",
    "status": "retrain status logs --watch",
    "eval": (
        "retrain eval logs/lab --checkpoint 25 --evaluation-samples 8 --evaluation-temperature 0.7"
    ),
    "export": "retrain export logs/lab --merged",
    "compare": "retrain compare logs/campaign --baseline maxrl+none",
    "diff": "retrain diff logs/campaign/runs/grpo+none_s42 logs/campaign/runs/maxrl+none_s42",
    "verify": "retrain verify logs/lab --steps 40:50",
    "report": "retrain report logs/lab --against gtpo_hicra",
    "inspect": "retrain inspect logs/lab --against gtpo_hicra",
    "audit": "retrain audit retrain.toml --examples 50",
    "power": "retrain power logs/campaign --effect 0.05",
    "xray": "retrain xray grpo grpo_std maxrl",
    "man": "retrain man --topic quickstart",
    "help": "retrain help training",
    "serve": "retrain serve vllm examples/lab.toml",
    "doctor": "retrain doctor --json",
    "backends": "retrain backends vllm",
    "plugins": "retrain plugins --json",
    "init-plugin": "retrain init-plugin --kind advantage --name my_advantage --with-test",
    "version": "retrain version",
}
"""One command line of each command, shown by its --help and in docs/commands.md."""

FLAGS = {
    "--max-steps": "training steps",
    "--seed": "seed of everything random; -1 draws one and stores it",
    "--lr": "learning rate",
    "--batch-size": "prompts per step",
    "--group-size": "completions per prompt",
    "--max-tokens": "maximum number of new tokens per completion",
    "--advantage-mode": "episode advantage: maxrl, grpo, rloo, ...",
    "--transform-mode": "token credit: none, gtpo, gtpo_hicra, gtpo_sepa, ...",
    "--log-dir": "the run's folder",
    "--resume": "continue the run in this folder",
}
"""The ten most used flags; `retrain help config` lists all."""


SWITCHES = {
    "--overwrite": "empty the run's folder first, if retrain made it",
    "--quiet": "print only the start, the evaluations and the end",
    "--verbose": "print every line, on a terminal too",
    "--skip-parity": "skip the check that the engine samples the trained policy",
}


def usage() -> str:
    return f"""\
retrain: reinforcement learning with verifiable rewards, a LoRA adapter out.

Usage:
  retrain [FILE.toml] [flags]   train; without a file, ./retrain.toml
  retrain COMMAND ...           `retrain COMMAND --help` says more

Commands:
{_table(COMMANDS)}

Flags (every key of the configuration has one):
{_table(FLAGS)}
{_table(SWITCHES)}

Exit codes: 0 done, 1 the run failed, 2 wrong usage or configuration,
3 the machine lacks something, 129, 130 and 143 interrupted.
"""


def _table(rows: dict[str, str]) -> str:
    return "\n".join(f"  {name:<18} {text}" for name, text in rows.items())
