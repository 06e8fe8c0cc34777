"""The job of a `[squeeze]` section: analyse an adapter, recommend a rank, write the smaller
adapter.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from retrain.backends.tinker.archive import download_adapter
from retrain.config import unused_keys
from retrain.config.effects import squeezes_remote_adapter
from retrain.errors import ConfigurationError, EnvironmentFailure
from retrain.parsing import expanded
from retrain.records.disk import replace_file, safetensors_io, writing_to
from retrain.records.run_folder import RunFolder
from retrain.records.terminal import GAP, clean, table_lines
from retrain.run.notes import trust_note
from retrain.run.parts import Say
from retrain.squeeze.accuracy import Accuracy, check_evaluable, measure_accuracy
from retrain.squeeze.adapter import LoraAdapter, read_adapter
from retrain.squeeze.analysis import Analysis, analyze, svd_device
from retrain.squeeze.compression import Compression, check_output, compress
from retrain.tracking.build import SQUEEZE_RUN, track_squeeze

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Squeeze

REPORT_FILE = "squeeze.json"


@dataclass(frozen=True)
class Squeezed:
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
        if self.compression:
            compression = compression_lines(self.compression)
        else:
            compression = []
        return [
            *analysis_lines(self.analysis),
            *compression,
            *([self.accuracy.line()] if self.accuracy else []),
        ]


def run_squeeze(config: "TrainConfig", *, overwrite: bool = False, quiet: bool = False) -> Squeezed:
    """Run a configuration with `[squeeze] adapter_path` and no `[campaign]`: results go to standard
    output, progress to standard error.
    """
    say, progress = (_silence, _silence) if quiet else (_print, partial(_print, file=sys.stderr))
    loads_model = config.squeeze.evaluate and bool(config.squeeze.output_path)
    for line in [
        *unused_keys(config),
        *([note] if loads_model and (note := trust_note(config.model)) else []),
    ]:
        say(line)
    with local_adapter(config) as adapter:
        squeezed = squeeze_adapter(config, adapter, overwrite=overwrite, progress=progress)
    for line in squeezed.lines():
        say(line)
    track_squeeze(
        config,
        RunFolder(Path(config.logging.log_dir).parent / SQUEEZE_RUN),
        squeezed.analysis.summary(),
        progress,
    )
    return squeezed


@contextmanager
def local_adapter(config: "TrainConfig") -> Iterator[Path]:
    """Yield the PEFT folder of `[squeeze] adapter_path`; a tinker:// path is downloaded from
    `[model] base_url` into a temporary one.

    Raises EnvironmentFailure where the service hands out no adapter.
    """
    path = config.squeeze.adapter_path
    if not squeezes_remote_adapter(config):
        yield expanded(path, "[squeeze] adapter_path")
        return
    with TemporaryDirectory(prefix="retrain-squeeze-") as folder:
        try:
            download_adapter(
                config.model.base_url, path, Path(folder), config.backend.tinker.timeout_s
            )
        except EnvironmentFailure as error:
            raise EnvironmentFailure(
                f"[squeeze] adapter_path = {path!r} cannot be analysed: {error}"
            ) from error
        yield Path(folder)


def _silence(line: str) -> None:
    """Print nothing (--quiet)."""


def _print(line: str, file: TextIO | None = None) -> None:
    print(clean(line), file=file, flush=True)


def squeeze_adapter(
    config: "TrainConfig", adapter_path: Path, *, overwrite: bool = False, progress: Say = _silence
) -> Squeezed:
    """Analyse the adapter as `[squeeze]` says; with `output_path` also compress it, with `evaluate`
    also evaluate both adapters.

    A campaign calls this after its first run, with that run's adapter. Raises ConfigurationError,
    EnvironmentFailure or RunFailed.
    """
    settings = config.squeeze
    adapter = read_adapter(adapter_path)
    device = svd_device(settings.device)
    output = (
        expanded(settings.output_path, "[squeeze] output_path") if settings.output_path else None
    )
    check_settings(settings, adapter)
    if output:
        check_output(adapter.folder, output, overwrite)  # before the work
    analysis = analyze(
        adapter,
        settings.min_variance_retention,
        settings.target_ranks,
        settings.source_rank,
        settings.rule,
        device,
    )
    if not output:
        return Squeezed(analysis)
    ranks = (
        analysis.ranks_per_layer()
        if settings.per_layer
        else settings.compress_to or analysis.recommended_rank
    )
    with writing_to(output, "run the job again"), safetensors_io():
        compression = compress(adapter, output, ranks, device, overwrite=overwrite)
    accuracy = measure_accuracy(config, adapter, output, progress) if settings.evaluate else None
    squeezed = Squeezed(analysis, compression, accuracy)
    spectra = [
        {"name": layer.name, "rank": layer.rank, "singular_values": layer.singular_values}
        for layer in analysis.layers
    ]
    replace_file(
        output / REPORT_FILE, json.dumps(squeezed.to_json() | {"layers": spectra}, indent=1) + "\n"
    )
    return squeezed


def check_settings(settings: "Squeeze", adapter: LoraAdapter) -> None:
    """Raise ConfigurationError for settings that do not fit the adapter."""
    if settings.compress_to > adapter.rank:
        raise ConfigurationError(
            f"[squeeze] compress_to = {settings.compress_to} is out of range; allowed: 1 to"
            f" {adapter.rank}, the rank of {adapter.folder}."
        )
    if settings.evaluate and settings.output_path:
        check_evaluable(adapter)


# -- what is printed -------------------------------------------------------------------------------


def analysis_lines(analysis: Analysis) -> list[str]:
    zero = len(analysis.zero_layers)
    count = len(analysis.layers)
    lines = [
        (
            f"Adapter {analysis.adapter}: rank {analysis.source_rank}, {count}"
            f" layers{f', {zero} of them zero' if zero else ''}."
        )
    ]
    rows: list[tuple[str, ...]] = [
        ("rank", "mean", "min", "max", "whole", "error of the whole", "")
    ]
    for row in analysis.table:
        values = (f"{value:.2%}" for value in (row.mean, row.min, row.max, row.energy, row.error))
        rows.append(
            (
                str(row.rank),
                *values,
                "<- recommended" if row.rank == analysis.recommended_rank else "",
            )
        )
    lines += [
        "Variance kept (squared singular values) by rank:",
        *table_lines(rows, right=range(6), indent=GAP),
    ]
    judged = "the mean over the layers" if analysis.rule == "mean" else "the worst layer"
    return [
        *lines,
        (
            f"Recommended rank: {analysis.recommended_rank} ({judged} keeps"
            f" {analysis.threshold:.0%} or more)."
        ),
    ]


def compression_lines(compression: Compression) -> list[str]:
    low, high = min(compression.ranks.values()), compression.rank
    if low == high:
        rank = f"rank {high}"
    else:
        rank = f"ranks {low} to {high}"
    saved = 1 - compression.parameters / compression.source_parameters
    return [
        (
            f"Compressed from rank {compression.source_rank} to {rank}:"
            f" {compression.source_parameters:,} -> {compression.parameters:,} parameters"
            f" ({saved:.0%} fewer)."
        ),
        (
            f"Reconstruction error: {compression.relative_error:.2%} of the whole update, and"
            f" {compression.storage_error:.1e} from rounding."
        ),
        f"Adapter: {compression.folder}",
    ]
