"""The data sources: each turns `[data]` into examples of one split, and counts what it could not use."""

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.data.records import SUFFIXES, Files, HubData, NoSplit, Record, Split, find_files, read_files, read_hub
from retrain.errors import ConfigurationError
from retrain.records.disk import expanded
from retrain.types import ChatMessage, Example

if TYPE_CHECKING:
    from retrain.config.schema import Data, TrainConfig


class Reason(StrEnum):
    """Why a row became no example."""

    MALFORMED = "malformed row"
    EMPTY_ANSWER = "empty answer"
    TOO_LONG = "prompt longer than the context"


@dataclass
class Harvest:
    """What a source yields."""

    examples: list[Example] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    """Rows by reason."""
    first: dict[str, str] = field(default_factory=dict)
    """The first row of each reason: a line of a file or an example's id."""
    notes: list[str] = field(default_factory=list)

    def drop(self, reason: Reason, where: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def dropped_notes(self) -> list[str]:
        """A sentence for each reason that was met here."""
        return [f"Dropped {self.dropped[reason]:,} x {reason}, the first is {where}" for reason, where in self.first.items()]


class NoHeldOutSplit(ConfigurationError):
    """Evaluation was asked for, and the data source has nothing held out."""


@dataclass(frozen=True)
class Request:
    """What is asked of a source."""

    config: "TrainConfig"
    data: "Data"
    """[data], or what [evaluation] source makes of it."""
    split: Split
    named_for_evaluation: bool
    """The source stands in [evaluation] source: all of it may be used where it has no split of its own."""

    @property
    def key(self) -> str:
        """Where the data is named, for messages."""
        if self.data.path:
            return f'[data] path = "{self.data.path}"'
        return f'{"[evaluation]" if self.named_for_evaluation else "[data]"} source = "{self.data.source}"'

    @property
    def path(self) -> Path:
        """[data] path, or the path in `source`; relative to the current folder, else to the configuration file's."""
        path = expanded(self.data.path or self.data.source, "[data] path" if self.data.path else "[data] source")
        beside = self.config.source_path
        if not path.exists() and beside is not None and (beside.parent / path).exists():
            return beside.parent / path
        return path

    def no_heldout(self) -> NoHeldOutSplit:
        return NoHeldOutSplit(
            f'[data] source = "{self.data.source}" has no held-out split, and an evaluation was asked for: put test.jsonl '
            "beside train.jsonl in a folder, set [evaluation] source, or switch off every, at_start and at_end there."
        )


def collect(request: Request) -> Harvest:
    """The examples of `request.data.source`. Raises ConfigurationError or EnvironmentFailure in one sentence."""
    source = request.data.source
    if source in SOURCES:
        return SOURCES[source](request)
    if source.startswith("hub:"):
        return _hub(request)
    if source in _registered:
        return _call(request, _registered[source])
    if "/" in source or source.endswith(SUFFIXES) or request.path.exists():
        return _local(request, SUFFIXES)
    return _plugin(request)


# ---- MATH and GSM8K -----------------------------------------------------------------------------------------------------------------

RowReader = Callable[[dict[str, Any], str], Example | Reason | None]
"""(columns, example id) -> the example, why there is none, or None for a row that belongs to another data set."""

MATH_NAME = "EleutherAI/hendrycks_math"
MATH_SUBJECTS = {
    "intermediate_algebra": "Intermediate Algebra",
    "precalculus": "Precalculus",
    "number_theory": "Number Theory",
    "counting_and_probability": "Counting & Probability",
    "geometry": "Geometry",
}
"""The five subjects of MATH that are trained on: configuration on the hub -> the column `type`."""
GSM8K = HubData("openai/gsm8k", "main")


def _math(request: Request) -> Harvest:
    """MATH (Hendrycks et al. 2021, arXiv 2103.03874), five subjects: 4,551 problems to train on."""
    if request.data.path:
        harvest, total = _benchmark_copy(request, _math_row)
        harvest.notes.insert(0, f"math: {len(harvest.examples):,} of the copy's {total:,} problems are in the five subjects and this split")
        return harvest
    names = ["train" if request.split == "train" else "test"]
    records = (record for subject in MATH_SUBJECTS for record in read_hub(HubData(MATH_NAME, subject), names))
    return _read(records, _math_row)


def _math_row(row: dict[str, Any], example_id: str) -> Example | Reason | None:
    from retrain.rewards.boxed import extract_boxed

    match row:
        case {"problem": str(problem), "solution": str(solution), "type": str(subject), **info} if problem.strip():
            if subject not in MATH_SUBJECTS.values():
                return None
            answer = extract_boxed(solution, after_think=False)
            info |= {"type": subject, "solution": solution}
            return Example(problem, answer, "math", info, example_id) if answer else Reason.EMPTY_ANSWER
    return Reason.MALFORMED


def _gsm8k(request: Request) -> Harvest:
    """GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 problems to train on, 1,319 held out."""
    if request.data.path:
        return _benchmark_copy(request, _gsm8k_row)[0]
    return _read(read_hub(GSM8K, ["train" if request.split == "train" else "test"]), _gsm8k_row)


def _gsm8k_row(row: dict[str, Any], example_id: str) -> Example | Reason | None:
    match row:
        case {"question": str(question), "answer": str(solution), **info} if question.strip():
            answer = solution.rpartition("####")[2].strip() if "####" in solution else ""
            answer = re.sub(r"(?<=\d),(?=\d{3})", "", answer)  # 70,000 -> 70000
            return Example(question, answer, "gsm8k", info | {"solution": solution}, example_id) if answer else Reason.EMPTY_ANSWER
    return Reason.MALFORMED


HELDOUT_SHARE = 10
"""Where a local copy of a benchmark has one split only, one problem in so many is held out."""


def _benchmark_copy(request: Request, read_row: RowReader) -> tuple[Harvest, int]:
    """A local copy of MATH or GSM8K, and the number of its rows."""
    found = find_files(request.path, request.key, prefer=request.data.source)
    if not found.sole:
        records = list(read_files(found.train if request.split == "train" else found.heldout))
        return _read(records, read_row), len(records)
    records = list(read_files(found.sole))
    harvest = _read(records, read_row)
    harvest.examples = [example for example in harvest.examples if _is_held_out(example) == (request.split == "heldout")]
    harvest.notes.append(
        f"{request.data.source}: {', '.join(file.name for file in found.sole)} is one split only, so one problem in {HELDOUT_SHARE}, "
        "chosen by the hash of its text, is held out and never trained on"
    )
    return harvest, len(records)


def _is_held_out(example: Example) -> bool:
    digest = hashlib.sha256(str(example.prompt).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") % HELDOUT_SHARE == 0


# ---- files and hub data sets with columns of their own ------------------------------------------------------------------------------


def _local(request: Request, suffixes: Iterable[str]) -> Harvest:
    found = find_files(request.path, request.key, suffixes)
    return _read(read_files(_files_of_split(found, request)), _column_reader(request.data))


def _files_of_split(found: Files, request: Request) -> tuple[Path, ...]:
    if found.sole:
        if request.split == "heldout" and not request.named_for_evaluation:
            raise request.no_heldout()
        return found.sole
    return found.train if request.split == "train" else found.heldout


def _hub(request: Request) -> Harvest:
    data = HubData.parse(request.data.source)
    reader = _column_reader(request.data)
    if request.split == "train" or (data.split and request.named_for_evaluation):
        return _read(read_hub(data, [data.split or "train"]), reader)
    try:
        return _read(read_hub(data, [name for name in ("test", "validation") if name != data.split]), reader)
    except NoSplit:
        raise request.no_heldout() from None


def _column_reader(data: "Data") -> RowReader:
    def read(row: dict[str, Any], example_id: str) -> Example | Reason | None:
        if data.prompt_column not in row or data.answer_column not in row:
            return Reason.MALFORMED
        info = {key: value for key, value in row.items() if key not in (data.prompt_column, data.answer_column, "task")}
        prompt, answer, task = _prompt(row[data.prompt_column]), row[data.answer_column], row.get("task", "default")
        if answer is None or answer == "" or (isinstance(answer, str) and not answer.strip()):
            return Reason.EMPTY_ANSWER
        if prompt is None or isinstance(answer, bool) or not isinstance(answer, str | int | float) or not isinstance(task, str):
            return Reason.MALFORMED
        return Example(prompt, str(answer).strip(), task, info or None, example_id)

    return read


def _prompt(value: object) -> str | list[ChatMessage] | None:
    """A text or a conversation; None for anything else and for an empty one."""
    match value:
        case str():
            return value if value.strip() else None
        case [_, *_]:
            messages = [_message(item) for item in value]
            return None if None in messages else [message for message in messages if message is not None]
    return None


def _message(value: object) -> ChatMessage | None:
    match value:
        case {"role": str(role), "content": str(content)}:
            return ChatMessage(role=role, content=content)
    return None


def _read(records: Iterable[Record], read_row: RowReader) -> Harvest:
    harvest = Harvest()
    columns: dict[str, None] = {}
    for record in records:
        columns |= dict.fromkeys(record.values or ())
        example = Reason.MALFORMED if record.values is None else read_row(record.values, record.example_id)
        if isinstance(example, Example):
            harvest.examples.append(example)
        elif example is not None:
            harvest.drop(example, record.where)
    if not harvest.examples and columns:
        harvest.notes.append(f"its columns are {', '.join(columns)}")
    return harvest


# ---- the lab, Python code -----------------------------------------------------------------------------------------------------------


def _lab(request: Request) -> Harvest:
    from retrain.data import lab

    return Harvest(lab.examples(request.split, request.data.difficulty))


DataLoader = Callable[..., Iterable[Example]]
"""`f(**params)`; one with held-out examples of its own also takes `split`, "train" by default or "heldout"."""

_registered: dict[str, DataLoader] = {}


def register_source(name: str, loader: DataLoader) -> None:
    """Make `[data] source = name` call `loader(**params)`, as a data plugin is called. Raises ValueError for a name that is taken."""
    from retrain.config.names import builtin_names, register_name

    if name in _registered or name in builtin_names("data"):
        raise ValueError(f"data source {name!r} exists already; choose another name")
    _registered[name] = loader
    register_name("data", name)


def _plugin(request: Request) -> Harvest:
    from retrain.plugins import load_plugin

    config = request.config.model_copy(update={"data": request.data})  # an evaluation source does not take the training source's params
    return _call(request, load_plugin("data", request.data.source, config))


def _call(request: Request, loader: DataLoader) -> Harvest:
    from retrain.plugins import user_code

    source, params = request.data.source, dict(request.data.params)
    signature = inspect.signature(loader)
    if "split" in signature.parameters:
        params["split"] = request.split
    elif request.split == "heldout" and not request.named_for_evaluation:
        raise request.no_heldout()
    try:
        signature.bind(**params)
    except TypeError as error:
        raise ConfigurationError(f'[data] params do not fit source = "{source}", whose signature is {signature}: {error}.') from error
    with user_code(f'[data] source = "{source}"', ConfigurationError):
        return _checked(loader(**params), source)


def _checked(examples: Iterable[Example], source: str) -> Harvest:
    harvest = Harvest()
    for index, example in enumerate(examples):
        where = f"{source} example {index}"
        if not isinstance(example, Example):
            raise ConfigurationError(
                f'[data] source = "{source}" gave a {type(example).__name__} where a retrain.data.Example is due ({where}).'
            )
        if not isinstance(example.reference, str) or _prompt(example.prompt) is None:
            harvest.drop(Reason.MALFORMED, where)
        elif not example.reference.strip():
            harvest.drop(Reason.EMPTY_ANSWER, where)
        else:
            harvest.examples.append(example)
    return harvest


SOURCES: dict[str, Callable[[Request], Harvest]] = {
    "math": _math,
    "gsm8k": _gsm8k,
    "lab": _lab,
    "jsonl": lambda request: _local(request, [".jsonl"]),
    "parquet": lambda request: _local(request, [".parquet"]),
}
