"""Settings that the workers of several benchmarks are given."""

import argparse
import sys
from pathlib import Path
from typing import Any

from processes import Worker

from retrain.model.text import resolve_model


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the model, and the number and length of the completions, that were asked for."""
    return {
        "model": str(Path(resolve_model(arguments.model)).resolve()),
        "prompts": arguments.prompts,
        "group": arguments.group,
        "tokens": arguments.tokens,
        "threads": arguments.threads,
    }


def make_adapter(settings: dict[str, Any], folder: str) -> int:
    """Write an adapter for the model of `settings` into `folder`. Return the model's vocabulary."""
    with Worker(sys.executable, "prepare.py", settings) as prepare:
        made = prepare.ask(make="adapter", model=settings["model"], folder=folder)
    return int(made["vocabulary"])
