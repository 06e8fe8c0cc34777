"""The tracker that writes a run's folder."""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.records.disk import replace_file, sync_folder
from retrain.records.entries import EMERGENCE_FIELDS, GenerationRecord, SftRecord, StepRecord
from retrain.records.environment import code_of, describe_environment
from retrain.records.evaluation import Evaluation
from retrain.records.jsonl import JsonlWriter, finite
from retrain.records.redact import Redactor
from retrain.records.run_folder import RunFolder
from retrain.records.summary import RunSummary
from retrain.records.terminal import clean
from retrain.records.token_table import write_tokens
from retrain.system import Json, read_object
from retrain.tracking.base import Event, Generations, StartEvent, Tokens, Tracker, is_due
from retrain.tracking.lines import lines_of

if TYPE_CHECKING:
    from retrain.config import TrainConfig
    from retrain.config.schema import Logging


class RunFiles(Tracker):
    def __init__(
        self, config: "TrainConfig", folder: RunFolder, redactor: Redactor, first_step: int = 0
    ) -> None:
        """`first_step`: steps completed when this session starts."""
        self._config = config
        self._first_step = first_step
        self._folder = folder
        self._redactor = redactor
        self._writers: dict[Path, JsonlWriter] = {}
        self._output = Output(folder, redactor, all_groups=config.logging.groups)

    def emit(self, event: Event) -> None:
        self._write(event)
        self._output.emit(event)

    def _write(self, event: Event) -> None:
        match event:
            case StartEvent(device):
                self._start(device)
            case Generations(step, records):
                for record in kept_generations(self._config.logging, step, records):
                    self._append(self._folder.generations, record.to_json())
            case Tokens(step, table):
                if self.wants_tokens(step):
                    write_tokens(self._folder.step_tokens(step), table, step)
            case StepRecord():
                values = event.to_json()
                self._append(
                    self._folder.emergence_steps, {name: values[name] for name in EMERGENCE_FIELDS}
                )
                self._append(self._folder.metrics, values)
            case SftRecord():
                self._append(self._folder.sft, event.to_json())
            case Evaluation():
                path = self._folder.evaluation
                if event.stage == "sft":
                    path = self._folder.sft_evaluation
                for problem in event.problems:
                    self._append(path, problem.to_json())
            case RunSummary():
                replace_file(self._folder.summary, _pretty(self._redactor.json(event.to_json())))

    def _start(self, device: str) -> None:
        """Write config.toml as this session resolved it, without `[resume] from`, and
        environment.json; the latter lists later sessions under `resumed`.
        """
        from retrain.config import dump_toml, replaced

        self._folder.create()
        changed = self._changed_keys()
        # An earlier session wrote it, and it is no longer true.
        self._folder.summary.unlink(missing_ok=True)
        # A copy of the file, or the file with another log_dir, begins a run of its own.
        own = replaced(self._config, {"resume.from": ""})
        replace_file(self._folder.config, dump_toml(self._redactor.config(own)))
        environment = describe_environment(device)
        environment = self._redactor.json(environment) | {
            "command": self._redactor.arguments(environment["command"]),
            # Not masked: hashes under names that may look like a secret's.
            "code": code_of(self._config),
        }
        if self._folder.environment.exists():
            first = read_object(self._folder.environment)
            before = first.get("resumed")
            environment |= {"step": self._first_step, "changed": changed}
            environment = first | {
                "resumed": [*(before if isinstance(before, list) else []), environment]
            }
        else:
            environment["folders"] = list(map(str, self._config.own_folders))
        replace_file(self._folder.environment, _pretty(environment))

    def _changed_keys(self) -> list[str]:
        """Name the keys with other values in earlier sessions of the run, with both values."""
        from retrain.config import load_stored
        from retrain.config.stored import differing_keys, shown_value

        if not (self._folder.environment.exists() and self._folder.config.is_file()):
            return []
        before, now = load_stored(self._folder.config), self._redactor.config(self._config)
        return [
            f"{key.path} ({shown_value(before, key.path)}, {shown_value(now, key.path)})"
            for key in differing_keys(before, now)
            if not key.traits.own_to_a_run
        ]

    def wants_tokens(self, step: int) -> bool:
        ends = (0, self._config.training.max_steps - 1)
        return step in ends or is_due(self._config.logging.tokens_every, step)

    def close(self) -> None:
        self._output.close()
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    @property
    def is_behind(self) -> bool:
        return any(writer.is_behind for writer in self._writers.values())

    def sync(self) -> dict[str, Json]:
        extents = {}
        for path in self._folder.lines():
            if path in self._writers or path.exists():
                extents[path.relative_to(self._folder.path).as_posix()] = asdict(
                    self._writer(path).sync()
                )
                sync_folder(path.parent)
        return extents

    def _append(self, path: Path, record: Json) -> None:
        self._writer(path).write(self._redactor.json(record))

    def _writer(self, path: Path) -> JsonlWriter:
        if path not in self._writers:
            self._writers[path] = JsonlWriter(path)
        return self._writers[path]


class Output:
    """Keeps the lines that a pipe would get in output.log, from all sessions of a run.

    Lines before the start wait for it, since until then retrain may refuse the folder. The log
    writes a line that the disk refuses again with the next line.
    """

    def __init__(self, folder: RunFolder, redactor: Redactor, *, all_groups: bool) -> None:
        self._folder = folder
        self._mask = redactor.text
        self._all_groups = all_groups
        self._waiting: list[str] = []
        self._writer: JsonlWriter | None = None
        self._printed = folder.prints_to_output

    def emit(self, event: Event) -> None:
        if self._printed:
            return
        if isinstance(event, StartEvent):
            self._writer = JsonlWriter(self._folder.output)
        lines = lines_of(event, self._folder.path, all_groups=self._all_groups)
        if isinstance(event, RunSummary) and event.reason:
            lines.insert(0, event.reason)
        self._waiting += [clean(self._mask(line)) for line in lines]
        if self._writer is not None:
            for line in self._waiting:
                self._writer.append(line.encode("utf-8", "backslashreplace") + b"\n")
            self._waiting.clear()

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):  # The disk is full, and the run has said so.
                self._writer.sync()
            self._writer.close()


def kept_generations(
    logging: "Logging", step: int, records: Sequence[GenerationRecord]
) -> list[GenerationRecord]:
    """Return the completions of a step that `[logging]` keeps; none for a step that is not due."""
    if is_due(logging.generations_every, step):
        return spread(records, logging.generations_per_step)
    return []


def spread(records: Sequence[GenerationRecord], count: int) -> list[GenerationRecord]:
    """Take `count` of a step's completions from as many prompts as possible: the first of every
    prompt, then the second of every one.
    """
    seen: Counter[str] = Counter()
    turns = []
    for record in records:
        turns.append(seen[record.prompt_id])
        seen[record.prompt_id] += 1
    order = sorted(range(len(records)), key=lambda index: (turns[index], index))
    return [records[index] for index in order[:count]]


def _pretty(value: Json) -> str:
    return json.dumps(finite(value), indent=2) + "\n"
