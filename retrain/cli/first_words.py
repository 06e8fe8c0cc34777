"""Give advice on a command line whose first word is neither a command nor a file."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from retrain.cli.usage import COMMANDS

TRAIN = ("train", "run", "fit", "start", "launch")
_MEANT = {
    "`retrain FILE.toml --resume RUN_DIR` continues a run": "resume continue resume-check",
    "`retrain eval RUN` evaluates a checkpoint": "evaluate test benchmark",
    "`retrain explain FILE.toml` says what would run, and with --probe measures a step": (
        "check validate trace plan dry-run"
    ),
    "`retrain status logs --watch` follows runs": "top watch monitor ps list ls",
    "`retrain report logs` draws a page": "plot dashboard view",
    "`retrain init` writes a configuration": "new create setup",
    "`retrain init --template lab --output lab.toml` writes its configuration, and `retrain"
    " lab.toml` trains it": "lab",
    "`retrain man --topic quickstart` shows the first steps": "quickstart tutorial",
    "`retrain man` is the manual, and `retrain help config` lists every key": "config keys docs",
    "a file with a [campaign] is one: `retrain FILE.toml`": "campaign sweep",
    "a file with [squeeze] adapter_path is one: `retrain FILE.toml`": "squeeze",
    "`retrain plugins` lists what every key can be": "plugin",
}
"""Advice -> the words of other programs that it answers."""


def advice(arguments: Sequence[str]) -> str:
    """Say what to type instead of a command line that begins with an unknown word."""
    from retrain.config.names import nearest

    word, *rest = arguments
    if word.lower() in TRAIN:
        line = "retrain FILE.toml"
        if any(argument.endswith(".toml") for argument in rest):
            line = shlex.join(["retrain", *rest])
        return f"a file needs no command: `{line}` trains."
    files = [Path(f"{word}.toml"), Path("examples", f"{word}.toml")]
    file = next((file for file in files if file.is_file()), None)
    if file:
        return f"did you mean `{shlex.join(['retrain', str(file), *rest])}`?"
    for clause, words in _MEANT.items():
        if word.lower() in words.split():
            return f"{clause}."
    near = nearest(word, COMMANDS)
    if near:
        return f"did you mean `retrain {near}`?"
    return "to train, name a file: `retrain FILE.toml`. `retrain --help` lists the commands."
