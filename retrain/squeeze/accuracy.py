"""Held-out accuracy before and after a compression: both adapters answer the same problems with the
same sampling noise.
"""

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from retrain.analysis.statistics import mean, standard_error
from retrain.config import TrainConfig, replaced
from retrain.errors import ConfigurationError
from retrain.records.evaluation import Z_95, Evaluation
from retrain.run.dialogues import Watcher
from retrain.run.interrupts import Interrupts
from retrain.run.parts import Say, load_parts
from retrain.squeeze.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraAdapter,
    read_adapter,
    weight_names,
)
from retrain.tracking.lines import pass_at_1


@dataclass(frozen=True)
class Accuracy:
    before: Evaluation
    after: Evaluation

    @property
    def differences(self) -> list[float]:
        """The accuracy after minus before, for each problem that was judged both times."""
        both = zip(self.before.problems, self.after.problems, strict=True)
        return [
            new.correct / new.samples - old.correct / old.samples
            for old, new in both
            if old.samples and new.samples
        ]

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean difference over new problems. Pairing by problem makes it
        far narrower than the intervals of the two accuracies. None for fewer than two problems, and
        if all differences are equal, so that the standard error is 0.
        """
        d = self.differences
        if len(d) > 1:
            error = standard_error(d)
        else:
            error = 0.0
        if error:
            return (mean(d) - Z_95 * error, mean(d) + Z_95 * error)
        return None

    def to_json(self) -> dict[str, Any]:
        if self.differences:
            difference = mean(self.differences)
        else:
            difference = None
        return {
            "before": self.before.summary(),
            "after": self.after.summary(),
            "difference": difference,
            "interval": self.interval,
        }

    def line(self) -> str:
        held_out = (
            f"Held-out {pass_at_1(self.before)} -> {pass_at_1(self.after)} on"
            f" {len(self.before.problems)} problems"
        )
        if self.interval is None:
            same = self.differences and not any(self.differences)
            return f"{held_out}{', the same accuracy on every problem' if same else ''}."
        low, high = self.interval
        change = (
            f"{100 * mean(self.differences):+.1f} pp, 95% interval {100 * low:+.1f} to"
            f" {100 * high:+.1f}"
        )
        return f"{held_out}: {change}, problem by problem."


def check_evaluable(adapter: LoraAdapter) -> None:
    """Raise ConfigurationError for an adapter that the local backend, which has one rank and one
    alpha, cannot load.
    """
    settings = adapter.settings
    plain = (
        not settings.get("rank_pattern")
        and not settings.get("alpha_pattern")
        and isinstance(settings.get("target_modules"), list)
    )
    if not plain or adapter.others or settings["lora_alpha"] != int(settings["lora_alpha"]):
        raise ConfigurationError(
            "[squeeze] evaluate = true needs an adapter with one rank, one whole-number alpha, a"
            f" list of its layers and nothing else trained, which {adapter.folder} is not; leave"
            " evaluate false."
        )


def measure_accuracy(
    config: TrainConfig, source: LoraAdapter, compressed: Path, say: Say
) -> Accuracy:
    """Measure pass@1 of both adapters by `[evaluation]`, `[data]`, `[reward]` and `[training]`, on
    `[model] model` or the adapter's own base.

    The compressed adapter is padded with zeros to the source's rank, which leaves its update and
    its scale unchanged.
    """
    from safetensors.torch import save_file

    settings = source.settings
    config = replaced(
        config,
        {
            "model.model": (
                config.model.model
                if config.is_set("model.model")
                else settings["base_model_name_or_path"]
            ),
            "model.lora_rank": source.rank,
            "lora.alpha": int(settings["lora_alpha"]),
            "lora.use_rslora": bool(settings.get("use_rslora")),
            "lora.target_modules": sorted(settings["target_modules"]),
            "evaluation.at_end": True,
            "backend.shard_base": False,
        },
    )
    with TemporaryDirectory() as name:
        padded = Path(name)
        tensors: dict[str, torch.Tensor] = {}
        for wide, layer in zip(source.layers, read_adapter(compressed).layers, strict=True):
            a, b = torch.zeros_like(wide.a), torch.zeros_like(wide.b)
            a[: layer.rank], b[:, : layer.rank] = layer.a, layer.b
            key_a, key_b = weight_names(layer.name)
            tensors |= {key_a: a, key_b: b}
        save_file(tensors, padded / WEIGHTS_FILE)
        (padded / CONFIG_FILE).write_text(json.dumps(source.settings), encoding="utf-8")
        return Accuracy(_evaluate(config, source.folder, say), _evaluate(config, padded, say))


def _evaluate(config: TrainConfig, adapter: Path, say: Say) -> Evaluation:
    parts = load_parts(replaced(config, {"lora.init_from": str(adapter)}), None, say, learns=False)
    with closing(parts), Interrupts() as interrupts:
        assert parts.evaluator is not None  # evaluation.at_end asked for it
        parts.backend.engine.sync(parts.backend.save_adapter, 0)
        return parts.evaluator.run(0, Watcher(interrupts.check, lambda _: None))
