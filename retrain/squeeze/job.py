"""The job of a `[squeeze]` section: analyze an adapter, recommend a rank, and write the smaller
adapter. The job compares the held-out accuracy of both on the same problems with the same random
numbers.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from torch.nn.functional import pad

from retrain.analysis.statistics import mean, standard_error
from retrain.backends.tinker.service import download_adapter
from retrain.config import TrainConfig, replaced, unused_keys
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.records.disk import replace_file, safetensors_io, writing_to
from retrain.records.evaluation import Z_95, Evaluation
from retrain.records.run_folder import RunFolder
from retrain.records.terminal import GAP, clean, table_lines
from retrain.run.evaluate import evaluate_weights
from retrain.run.notes import trust_note
from retrain.run.parts import Say
from retrain.squeeze.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    LoraAdapter,
    read_adapter,
    weight_names,
)
from retrain.squeeze.analysis import Analysis, analyze_adapter
from retrain.squeeze.compression import (
    Compression,
    check_output,
    compress_adapter,
    rank_words,
    ranks_of,
)
from retrain.tracking.build import SQUEEZE_RUN, track_squeeze
from retrain.tracking.lines import pass_at_1
from retrain.types import Doing

if TYPE_CHECKING:
    from retrain.config.schema import Squeeze


# -- held-out accuracy -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Accuracy:
    before: Evaluation
    after: Evaluation

    @property
    def differences(self) -> list[float]:
        """The accuracy after minus before, for each problem with a verdict both times."""
        both = zip(self.before.problems, self.after.problems, strict=True)
        return [
            new.correct / new.samples - old.correct / old.samples
            for old, new in both
            if old.samples and new.samples
        ]

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean difference over new problems. Pairing by problem makes it
        far narrower than the intervals of the two accuracies. It is None for fewer than two
        problems, and if all differences are equal, so that the standard error is 0.
        """
        d = self.differences
        half = Z_95 * standard_error(d) if len(d) > 1 else 0.0
        return (mean(d) - half, mean(d) + half) if half else None

    def to_json(self) -> dict[str, Any]:
        return {
            "before": self.before.summary(),
            "after": self.after.summary(),
            "difference": mean(self.differences) if self.differences else None,
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
        change, low, high = (100 * one for one in (mean(self.differences), *self.interval))
        return (
            f"{held_out}: {change:+.1f} pp, 95% interval {low:+.1f} to {high:+.1f}, problem by"
            " problem."
        )


def measure_accuracy(
    config: TrainConfig, source: LoraAdapter, compressed: Path, log: Say
) -> Accuracy:
    """Measure pass@1 of both adapters by `[evaluation]`, `[data]`, `[reward]` and `[training]`, on
    `[model] model` or the adapter's own base.

    The function pads the compressed adapter with zeros to the source's rank, which does not change
    its update and its scale.
    """
    from safetensors.torch import save_file

    settings, model = source.settings, config.model.model
    if not config.is_set("model.model"):
        model = settings["base_model_name_or_path"]
    config = replaced(
        config,
        {
            "model.model": model,
            "model.lora_rank": source.rank,
            "lora.alpha": int(settings["lora_alpha"]),
            "lora.use_rslora": bool(settings.get("use_rslora")),
            "lora.target_modules": sorted(settings["target_modules"]),
            # retrain loads held-out problems only for an evaluation.
            "evaluation.at_end": True,
            "backend.shard_base": False,
        },
    )
    with TemporaryDirectory() as name:
        padded = Path(name)
        tensors = {}
        for layer in read_adapter(compressed).layers:
            key_a, key_b = weight_names(layer.name)
            tensors[key_a] = pad(layer.a, (0, 0, 0, source.rank - layer.rank))
            tensors[key_b] = pad(layer.b, (0, source.rank - layer.rank))
        save_file(tensors, padded / WEIGHTS_FILE)
        (padded / CONFIG_FILE).write_text(json.dumps(settings), encoding="utf-8")
        both = (replaced(config, {"lora.init_from": str(one)}) for one in (source.folder, padded))
        return Accuracy(*(evaluate_weights(each, None, log) for each in both))


# -- the job ---------------------------------------------------------------------------------------


REPORT_FILE = "squeeze.json"


@dataclass(frozen=True)
class SqueezeResult:
    """The results of a squeeze job."""

    analysis: Analysis
    compression: Compression | None = None
    """None without `[squeeze] output_path`."""
    accuracy: Accuracy | None = None
    """None without `[squeeze] evaluate`."""

    def to_json(self) -> dict[str, Any]:
        """Return recommended_rank, rule, threshold and table for a campaign's manifest, and the
        compression and evaluation if there are any.
        """
        parts = {"compression": self.compression, "evaluation": self.accuracy}
        return self.analysis.to_json() | {
            name: part.to_json() for name, part in parts.items() if part
        }

    def lines(self) -> list[str]:
        """Return the printed table and results."""
        lines = _analysis_lines(self.analysis)
        if found := self.compression:
            saved = 1 - found.parameters / found.source_parameters
            lines += [
                (
                    f"Compressed from rank {found.source_rank} to {rank_words(found.ranks)}:"
                    f" {found.source_parameters:,} -> {found.parameters:,} parameters"
                    f" ({saved:.0%} fewer)."
                ),
                (
                    f"Reconstruction error: {found.relative_error:.2%} of the whole update, and"
                    f" {found.storage_error:.1e} from rounding."
                ),
                f"Adapter: {found.folder}",
            ]
        if self.accuracy:
            lines.append(self.accuracy.line())
        return lines


def run_squeeze(
    config: "TrainConfig", *, overwrite: bool = False, quiet: bool = False
) -> SqueezeResult:
    """Run a configuration with `[squeeze] adapter_path` and no `[campaign]`: results go to standard
    output, progress to standard error.
    """
    log, progress = (_silence, _silence) if quiet else (_print, partial(_print, file=sys.stderr))
    settings, path = config.squeeze, Path(config.squeeze.adapter_path)
    evaluates = settings.evaluate and settings.output_path
    note = trust_note(config.model) if evaluates else ""
    for line in filter(None, (*unused_keys(config), note)):
        log(line)
    with TemporaryDirectory(prefix="retrain-squeeze-") as folder:
        if settings.is_remote:
            path, seconds = Path(folder), config.backend.tinker.timeout_s
            try:
                download_adapter(config.model.base_url, settings.adapter_path, path, seconds)
            except EnvironmentFailure as error:
                raise EnvironmentFailure(
                    f"[squeeze] adapter_path = {settings.adapter_path!r} has no analysis: {error}"
                ) from error
        squeezed = squeeze_adapter(config, path, overwrite=overwrite, progress=progress)
    for line in squeezed.lines():
        log(line)
    track_squeeze(
        config,
        RunFolder(Path(config.logging.log_dir).parent / SQUEEZE_RUN),
        squeezed.analysis.summary(),
        progress,
    )
    return squeezed


def _silence(line: str) -> None:
    """Print nothing (--quiet)."""


def _print(line: str, file: TextIO | None = None) -> None:
    if not isinstance(line, Doing):
        print(clean(line), file=file, flush=True)


def squeeze_adapter(
    config: "TrainConfig", adapter_path: Path, *, overwrite: bool = False, progress: Say = _silence
) -> SqueezeResult:
    """Analyze the adapter as `[squeeze]` says; with `output_path` also compress it, with `evaluate`
    also evaluate both adapters.

    A campaign calls this after its first run, with that run's adapter. Raises ConfigurationError,
    EnvironmentFailure or RunFailed.
    """
    settings, adapter = config.squeeze, read_adapter(adapter_path)
    output = Path(settings.output_path)
    check_settings(settings, adapter)
    if settings.output_path:
        # Check the output before the work.
        check_output(adapter.folder, output, overwrite)
    names = {"min_variance_retention", "target_ranks", "source_rank", "rule", "device"}
    analysis = analyze_adapter(adapter_path, **settings.model_dump(include=names))
    if not settings.output_path:
        return SqueezeResult(analysis)
    ranks = (
        analysis.ranks_per_layer()
        if settings.per_layer
        else settings.compress_to or analysis.recommended_rank
    )
    with writing_to(output, "run the job again"), safetensors_io():
        compression = compress_adapter(
            adapter_path, output, ranks, device=settings.device, overwrite=overwrite
        )
    accuracy = measure_accuracy(config, adapter, output, progress) if settings.evaluate else None
    squeezed = SqueezeResult(analysis, compression, accuracy)
    spectra = [
        {"name": layer.name, "rank": layer.rank, "singular_values": layer.singular_values}
        for layer in analysis.layers
    ]
    replace_file(
        output / REPORT_FILE, json.dumps(squeezed.to_json() | {"layers": spectra}, indent=1) + "\n"
    )
    return squeezed


def check_settings(settings: "Squeeze", adapter: LoraAdapter) -> None:
    """Raise ConfigurationError for settings that do not fit the adapter. To evaluate it, the local
    backend has to load it, which has one rank and one alpha.
    """
    if settings.compress_to:
        ranks_of(adapter, settings.compress_to)
    own = adapter.settings
    more = own.get("rank_pattern") or own.get("alpha_pattern") or adapter.others
    listed = isinstance(own.get("target_modules"), list)
    evaluates = settings.evaluate and settings.output_path
    if evaluates and (more or not listed or own["lora_alpha"] % 1):
        raise ConfigurationError(
            "[squeeze] evaluate = true needs an adapter with one rank, one whole-number alpha, a"
            f" list of its layers and nothing else trained, which {adapter.folder} is not; leave"
            " evaluate false."
        )


# -- what is printed -------------------------------------------------------------------------------


def _analysis_lines(analysis: Analysis) -> list[str]:
    zero = len(analysis.zero_layers)
    rows: list[tuple[str, ...]] = [
        ("rank", "mean", "min", "max", "whole", "error of the whole", "")
    ]
    for row in analysis.table:
        values = (f"{value:.2%}" for value in (row.mean, row.min, row.max, row.energy, row.error))
        mark = "<- recommended" if row.rank == analysis.recommended_rank else ""
        rows.append((str(row.rank), *values, mark))
    judged = "the mean over the layers" if analysis.rule == "mean" else "the worst layer"
    return [
        (
            f"Adapter {analysis.adapter}: rank {analysis.source_rank}, {len(analysis.layers)}"
            f" layers{f', {zero} of them zero' if zero else ''}."
        ),
        "Variance kept (squared singular values) by rank:",
        *table_lines(rows, right=range(6), indent=GAP),
        (
            f"Recommended rank: {analysis.recommended_rank} ({judged} keeps"
            f" {analysis.threshold:.0%} or more)."
        ),
    ]
