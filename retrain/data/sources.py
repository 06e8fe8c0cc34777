"""The data sources: each reads the examples of one split, as `[data]` describes it, and counts the
rows that it cannot use.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.config.names import DATA_FILE_SUFFIXES, builtin_names, registered_sources, source_task
from retrain.data import lab
from retrain.data.readers import HubData, NoSplit, RawRow, Split, find_files, read_files, read_hub
from retrain.errors import ConfigurationError
from retrain.system import parse_json
from retrain.types import ChatMessage, Example

if TYPE_CHECKING:
    from retrain.config.schema import Data, TrainConfig


class Reason(StrEnum):
    """The reason why a row became no example."""

    MALFORMED = "malformed"
    NOT_JSON = "not a JSON object"
    SURROGATE = "with an unpaired surrogate"
    NO_ANSWER = "without an answer"
    NO_COMPLETION = "without a completion"
    TOO_LONG = "longer than the limit of tokens"
    BOTH = "with both messages and a completion"
    TOOL_CALLS = "with tool calls in a reply"
    REWRITTEN = "whose earlier turns the chat template writes otherwise later"


def has_utf8_form(example: Example) -> bool:
    """Return True if prompt and reference have a UTF-8 form, which a tokenizer needs. JSON may
    escape half of a surrogate pair.
    """
    try:
        json.dumps([example.prompt, example.reference], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def dropped_words(count: int, reason: str, first: str) -> str:
    """Return the words of a message: `3 malformed (first: rows.jsonl line 2)`."""
    return f"{count:,} {reason} ({first if count == 1 else f'first: {first}'})"


@dataclass
class ReadResult:
    """The examples of one split, and remarks from reading them."""

    data: "Data"
    """[data] as it applies here, where [evaluation] source may have replaced the source."""
    examples: list[Example] = field(default_factory=list)
    dropped: Counter[Reason] = field(default_factory=Counter)
    """Number of rows that became no example, by reason."""
    first: dict[Reason, str] = field(default_factory=dict)
    """The first row of each reason, as a line of a file or an example's id."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the start of the run."""

    def keep(self, example: Example, where: str) -> None:
        """Append an example, unless its text has no UTF-8 form."""
        if has_utf8_form(example):
            self.examples.append(example)
        else:
            self.drop(Reason.SURROGATE, where)

    def drop(self, reason: Reason, where: str) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, where)

    def dropped_rows(self) -> str:
        """Return the dropped rows by reason, in words, or "" without any."""
        return ", ".join(
            dropped_words(count, reason, self.first[reason])
            for reason, count in self.dropped.items()
        )


class NoHeldOutSplit(ConfigurationError):
    """The data source has no held-out examples for an evaluation."""


@dataclass(frozen=True)
class Query:
    """A request to a source for the examples of one split."""

    config: "TrainConfig"
    data: "Data"
    """[data], or what [evaluation] source makes of it."""
    split: Split
    named_for_evaluation: bool
    """True if [evaluation] source names the source, so that an evaluation may use all of its
    examples if it has no splits.
    """
    traces: bool = False
    """True if [sft] reads it. An example's reference is the completion to learn, or "" for a
    conversation with replies to learn.
    """

    @property
    def key(self) -> str:
        """The key that names the data, for messages."""
        section = "evaluation" if self.named_for_evaluation else "data"
        if self.traces and self.config.sft.source:
            section = "sft"
        key = f"[{section}] {'path' if self.data.path else 'source'}"
        if self.named_for_evaluation and self.data.path:
            key = f"[evaluation.tasks.{source_task(self.data.source)}] path"
        return f'{key} = "{self.data.path or self.data.source}"'

    @property
    def path(self) -> Path:
        """The path that `key` names."""
        return self.config.find(self.data.path or self.data.source)

    def no_heldout(self) -> NoHeldOutSplit:
        named = self.data.source in self.config.evaluation.sources
        too = ", which [evaluation] source names too," if named else ""
        return NoHeldOutSplit(
            f'[data] source = "{self.data.source}"{too} has no held-out split for the evaluation.'
            " Put test.jsonl next to train.jsonl in a folder, name other problems in"
            " [evaluation] source, or switch off every, at_start and at_end there."
        )


def read_source(query: Query) -> ReadResult:
    """Return the examples of `query.data.source`. Raises ConfigurationError or EnvironmentFailure
    in one sentence.
    """
    source = query.data.source
    if source in SOURCES:
        read = SOURCES[source](query)
        if query.traces and source not in ("jsonl", "parquet"):
            _take_solutions(read)
        return read
    if source.startswith("hub:"):
        data, reader = HubData.parse(source), _column_reader(query)
        if query.split == "train" or (data.split and query.named_for_evaluation):
            return _read(query, read_hub(data, [data.split or "train"]), reader)
        try:
            return _read(
                query,
                read_hub(data, [name for name in ("test", "validation") if name != data.split]),
                reader,
            )
        except NoSplit:
            raise query.no_heldout() from None
    if source in _registered:
        return _call(query, _registered[source])
    if "/" in source or source.endswith(DATA_FILE_SUFFIXES) or query.path.exists():
        return _local(query, DATA_FILE_SUFFIXES)
    return _call(query, load_source(query))


def load_source(query: Query) -> Any:
    """Load the plugin that a source names."""
    from retrain.plugins import load_plugin

    # An evaluation source does not take the training source's params.
    config = query.config.model_copy(update={"data": query.data})
    return load_plugin("data", query.data.source, config, key=query.key)


def source_key(query: Query) -> tuple[Hashable, ...] | None:
    """Return the values that identify the result of `read_source`, with time and size of each file;
    None if the user's own code reads it.
    """
    source, path = query.data.source, query.path
    named = source in SOURCES or source.startswith("hub:")
    if source in _registered or not (named or "/" in source or path.exists()):
        return None
    found = []
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in DATA_FILE_SUFFIXES)
    elif path.exists():
        found = [path]
    files = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in found]
    return query.data.model_dump_json(), query.split, query.named_for_evaluation, *files


# ---- MATH and GSM8K ------------------------------------------------------------------------------

RowReader = Callable[[dict[str, Any], str], Example | Reason | None]
"""(columns, example id) -> the example, the reason why there is none, or None for a row of another
data set."""

MATH_NAME = "EleutherAI/hendrycks_math"
MATH_SUBJECTS = {
    "intermediate_algebra": "Intermediate Algebra",
    "precalculus": "Precalculus",
    "number_theory": "Number Theory",
    "counting_and_probability": "Counting & Probability",
    "geometry": "Geometry",
}
"""The five subjects of MATH that retrain uses: configuration on the hub -> the column `type`."""
GSM8K = HubData("openai/gsm8k", "main")


def _math(query: Query) -> ReadResult:
    """Read MATH (Hendrycks et al. 2021, arXiv 2103.03874), five subjects: 4,551 training
    problems.
    """
    if query.data.path:
        result, total = _benchmark_copy(query, _math_row)
        result.notes.insert(
            0,
            f"math: {len(result.examples):,} of the copy's {total:,} problems are in the five"
            " subjects and this split",
        )
        return result
    names = ["train" if query.split == "train" else "test"]
    rows = chain.from_iterable(
        read_hub(HubData(MATH_NAME, subject), names) for subject in MATH_SUBJECTS
    )
    return _read(query, rows, _math_row)


def _math_row(row: dict[str, Any], example_id: str) -> Example | Reason | None:
    from retrain.rewards.answers import extract_boxed

    match row:
        case {
            "problem": str(problem),
            "solution": str(solution),
            "type": str(subject),
            **info,
        } if problem.strip():
            if subject not in MATH_SUBJECTS.values():
                return None
            answer = extract_boxed(solution, after_think=False)
            info |= {"type": subject, "solution": solution}
            if answer:
                return Example(problem, answer, "math", info, example_id)
            return Reason.NO_ANSWER
    return Reason.MALFORMED


def _gsm8k(query: Query) -> ReadResult:
    """Read GSM8K (Cobbe et al. 2021, arXiv 2110.14168): 7,473 training problems and 1,319 held-out
    ones.
    """
    if query.data.path:
        return _benchmark_copy(query, _gsm8k_row)[0]
    return _read(
        query, read_hub(GSM8K, ["train" if query.split == "train" else "test"]), _gsm8k_row
    )


def _gsm8k_row(row: dict[str, Any], example_id: str) -> Example | Reason | None:
    match row:
        case {"question": str(question), "answer": str(solution), **info} if question.strip():
            answer = solution.rpartition("####")[2].strip() if "####" in solution else ""
            answer = re.sub(r"(?<=\d),(?=\d{3})", "", answer)  # 70,000 -> 70000
            if answer:
                return Example(question, answer, "gsm8k", info | {"solution": solution}, example_id)
            return Reason.NO_ANSWER
    return Reason.MALFORMED


@dataclass(frozen=True)
class Benchmark:
    """A set of problems for evaluation alone."""

    hub: HubData
    read_row: RowReader

    def __call__(self, query: Query) -> ReadResult:
        if query.split == "train":
            raise ConfigurationError(
                f"{query.key} is an evaluation set, not for training; name it in [evaluation]"
                " source."
            )
        if query.data.path:
            train, heldout = find_files(query.path, query.key, prefer=query.data.source)
            return _read(query, read_files(heldout or train), self.read_row)
        return _read(query, read_hub(self.hub, [self.hub.split]), self.read_row)


def _solved_row(row: dict[str, Any], example_id: str) -> Example | Reason:
    """MATH-500 and AIME: `problem` and `answer`."""
    match row:
        case {"problem": str(problem), "answer": answer, **info} if problem.strip():
            reference = _reference(answer)
            if isinstance(reference, Reason):
                return reference
            if reference.isdecimal():  # AIME writes 33 as 033
                reference = reference.lstrip("0") or "0"
            return Example(problem, reference, "default", info, example_id)
    return Reason.MALFORMED


_GPQA = (
    "Question",
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
)


def _gpqa_row(row: dict[str, Any], example_id: str) -> Example | Reason:
    """Read a row with four options, ordered by the hashes of their texts with the question's, so
    that every copy of the set asks alike. The reference is the letter.
    """
    texts = [row.get(name) for name in _GPQA]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return Reason.MALFORMED
    question, *options = (str(text).strip() for text in texts)
    hashes = [hashlib.sha256(f"{question}\n{option}".encode()).digest() for option in options]
    order = sorted(range(4), key=hashes.__getitem__)
    shown = [f"{letter}) {options[index]}" for letter, index in zip("ABCD", order, strict=True)]
    asked = "\n".join([question, "", *shown, "", "Answer with the letter of the right option."])
    info = {name: value for name, value in row.items() if name not in _GPQA}
    return Example(asked, "ABCD"[order.index(0)], "default", info, example_id)


HELDOUT_SHARE = 10
"""Number of problems per held-out problem in a local copy with a single split."""


def _benchmark_copy(query: Query, read_row: RowReader) -> tuple[ReadResult, int]:
    """Return the examples from a local copy of MATH or GSM8K, and the number of rows."""
    train, heldout = find_files(query.path, query.key, prefer=query.data.source)
    rows = list(read_files(heldout if heldout and query.split == "heldout" else train))
    result = _read(query, rows, read_row)
    if heldout:
        return result, len(rows)
    result.examples = [
        one for one in result.examples if _is_heldout(one) == (query.split == "heldout")
    ]
    result.notes.append(
        f"{query.data.source}: {', '.join(file.name for file in train)} is one split only, so"
        f" retrain holds out one problem in {HELDOUT_SHARE}, by the hash of its text, and never"
        " trains on it"
    )
    return result, len(rows)


def _is_heldout(example: Example) -> bool:
    digest = hashlib.sha256(str(example.prompt).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELDOUT_SHARE == 0


# ---- files and hub data sets with columns of their own -------------------------------------------


def _local(query: Query, suffixes: Sequence[str]) -> ReadResult:
    train, heldout = find_files(query.path, query.key, suffixes)
    if query.split == "heldout" and not heldout and not query.named_for_evaluation:
        raise query.no_heldout()
    files = heldout if heldout and query.split == "heldout" else train
    return _read(query, read_files(files), _column_reader(query))


def _column_reader(query: Query) -> RowReader:
    data = query.data
    if query.traces:
        return partial(_trace_row, data, query.config.sft.completion_column)

    def read(row: dict[str, Any], example_id: str) -> Example | Reason | None:
        try:
            prompt = _prompt(_column(row, data.prompt_column))
            reference = _reference(_column(row, data.answer_column))
        except KeyError:
            return Reason.MALFORMED
        task = row.get("task", "default")
        if isinstance(reference, Reason):
            return reference
        if prompt is None or not isinstance(task, str):
            return Reason.MALFORMED
        used = (data.prompt_column, data.answer_column, "task")
        info = {key: value for key, value in row.items() if key not in used}
        return Example(prompt, reference, task, info or None, example_id)

    return read


def _trace_row(data: "Data", named: str, row: dict[str, Any], example_id: str) -> Example | Reason:
    """Read a prompt and its completion, each a text or messages, or a conversation in `messages`
    with replies to learn.
    """
    info = {"tools": row["tools"]} if row.get("tools") else None
    messages = row.get("messages")
    column = named or "completion"
    if messages and row.get(column) is None:
        talk = _prompt(messages)
        if isinstance(talk, list):
            return Example(talk, "", "default", info, example_id)
        return Reason.MALFORMED
    if messages and not named and data.prompt_column != "messages":
        return Reason.BOTH
    try:
        completion = _prompt(_column(row, column))
        usual = "prompt" in row and data.prompt_column not in row
        prompt = _prompt(_column(row, "prompt" if usual else data.prompt_column))
    except KeyError:
        return Reason.MALFORMED
    match completion:
        case [{"role": "assistant", "tool_calls": _}]:
            return Reason.TOOL_CALLS
        case [{"role": "assistant", "content": str(content)}] if content.strip():
            completion = content
    if not isinstance(completion, str):
        return Reason.NO_COMPLETION
    return Example(prompt, completion, "default", info, example_id) if prompt else Reason.MALFORMED


def _take_solutions(read: ReadResult) -> None:
    """Take the solution of each example for its completion, and drop those without one."""
    examples = read.examples
    read.examples = []
    for example in examples:
        solution = (example.info or {}).get("solution")
        if isinstance(solution, str) and solution.strip():
            read.examples.append(replace(example, reference=solution))
        else:
            read.drop(Reason.NO_COMPLETION, example.example_id)


def _column(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or of a field in a column: "reward_model.ground_truth". Raises
    KeyError.
    """
    outer, _, inner = name.partition(".")
    if name in row or not inner:
        return row[name]
    fields = _from_json(row[outer], "{")
    return _column(fields, inner) if isinstance(fields, dict) else None


def _from_json(value: object, start: str) -> Any:
    """Parse a column's JSON text that begins with `start`, as data frames and CSV write tables.
    Return any other value unchanged.
    """
    if isinstance(value, str) and value.startswith(start):
        with suppress(ValueError):
            return parse_json(value)
    return value


def _reference(answer: object) -> str | Reason:
    """Return an answer as text, or the reason why it is none. A number is in positional notation,
    and an integer has no fraction: a data frame makes 137.0 of 137 where another row has no answer.
    """
    if isinstance(answer, int | float | Decimal | np.integer | np.floating) and not isinstance(
        answer, bool
    ):
        number = Decimal(str(answer))
        if not number.is_finite():
            return Reason.NO_ANSWER
        answer = f"{number:zf}"
        if "." in answer:
            answer = answer.rstrip("0").removesuffix(".")
    if answer is None:
        return Reason.NO_ANSWER
    if not isinstance(answer, str):
        return Reason.MALFORMED
    return answer.strip() or Reason.NO_ANSWER


def _prompt(value: object) -> str | list[ChatMessage] | None:
    """Read a text or a conversation; None for anything else and for an empty one."""
    match _from_json(value, '[{"role"'):
        case str(text):
            return text if text.strip() else None
        case [_, *_] as items:
            messages: list[ChatMessage] = []
            for item in items:
                match item:
                    case {"role": str(role), "content": str(content), **more}:
                        message = ChatMessage(role=role, content=content)
                    case {"role": str(role), "tool_calls": [_, *_] as calls, **more} if (
                        not more.get("content")
                    ):
                        message = ChatMessage(role=role, content="", tool_calls=calls)
                    case _:
                        return None
                for key in ("name", "tool_calls", "tool_call_id"):
                    if more.get(key):
                        message[key] = more[key]  # type: ignore[typeddict-item]
                messages.append(message)
            return messages
    return None


def _read(query: Query, rows: Iterable[RawRow], read_row: RowReader) -> ReadResult:
    result = ReadResult(query.data)
    columns: dict[str, None] = {}
    repeated = []
    for row in rows:
        if row.repeated:
            repeated.append(f"{row.where}, {row.repeated}")
        for name, text in (row.columns or {}).items():
            value = _from_json(text, "{")
            fields = [f"{name}.{each}" for each in value] if isinstance(value, dict) else [name]
            columns |= dict.fromkeys(fields)
        example = Reason.NOT_JSON if row.columns is None else read_row(row.columns, row.example_id)
        if isinstance(example, Example):
            result.keep(example, row.where)
        elif example is not None:
            result.drop(example, row.where)
    if repeated:
        result.notes.append(
            f"Rows with a key twice, of which the last counts: {len(repeated):,}"
            f" (first: {repeated[0]})"
        )
    if not result.examples and columns:
        result.notes.append(
            f"its columns are {', '.join(columns)}{_columns_to_set(query, columns)}"
        )
    if not result.examples and Reason.NOT_JSON in result.dropped:
        result.notes.append(
            "convert it: a .jsonl file is UTF-8 text with one JSON object per line, not CSV and not"
            " a JSON list"
        )
    return result


_USUAL = {
    "prompt_column": (
        "prompt",
        "question",
        "problem",
        "instruction",
        "input",
        "query",
        "text",
        "messages",
    ),
    "answer_column": (
        "reward_model.ground_truth",
        "answer",
        "solution",
        "gold",
        "target",
        "label",
        "reference",
        "output",
        "ground_truth",
        "final_answer",
        "expected",
    ),
}
"""Names that data sets give to the two columns; of several, the first that is there is meant."""


def _columns_to_set(query: Query, columns: Collection[str]) -> str:
    """Return, as the end of a sentence, which keys name the columns of unreadable rows."""
    data = query.data
    if query.traces:
        return (
            "; a trace has a prompt and a completion, in the columns that [data] prompt_column and"
            " [sft] completion_column name, or messages"
        )
    given = {"prompt_column": data.prompt_column, "answer_column": data.answer_column}
    absent = {key: name for key, name in given.items() if name not in columns}
    if data.source in ("math", "gsm8k"):
        return "; check the file"
    if not absent:
        return (
            f"; {data.prompt_column} is to be a text or a conversation, and {data.answer_column} a"
            " text or a number"
        )
    free = [name for name in columns if name not in given.values()]
    words = []
    for key in absent:
        meant = next((name for name in _USUAL[key] if name in free), "")
        if meant:
            free.remove(meant)
            words.append(f'{key} = "{meant}"')
        elif free:
            words.append(f"{key} to a column of these")
        else:
            words.append(f"{key} to a column that you add")
    return f"; set [data] {' and '.join(words)}"


# ---- Python code ---------------------------------------------------------------------------------

DataLoader = Callable[..., Iterable[Example]]
"""`f(**params)`. A loader with held-out examples of its own also takes `split`: "train", the
default, or "heldout".
"""

_registered: dict[str, DataLoader] = {}


def register_source(name: str, loader: DataLoader) -> None:
    """Make `[data] source = name` call `loader(**params)`, like a data plugin. Raises ValueError if
    the name exists.
    """
    if name in _registered or name in builtin_names("data"):
        raise ValueError(f"data source {name!r} exists already; choose another name")
    _registered[name] = loader
    registered_sources.add(name)


def _call(query: Query, loader: DataLoader) -> ReadResult:
    from retrain.plugins import source_arguments, user_code

    given = source_arguments(loader, query.data.params, query.split, query.key)
    if query.split == "heldout" and "split" not in given and not query.named_for_evaluation:
        raise query.no_heldout()
    with user_code(query.key, ConfigurationError):
        read = _checked(query, _bounded(query, loader(**given)))
    if query.traces and not query.config.sft.source:  # its references are answers
        _take_solutions(read)
    return read


MAX_STREAMED = 1_000_000
"""Maximum number of examples of a source without a length; more would fill the memory before any
message.
"""


def _bounded(query: Query, examples: Iterable[Example]) -> Iterator[Example]:
    """Yield the examples, of a training source without a length (a generator, say) the first
    `[training] max_examples`.

    Raises ConfigurationError if it gives more than MAX_STREAMED: it may never end.
    """
    limit = query.config.training.max_examples if query.split == "train" else 0
    if isinstance(examples, Sized):
        yield from examples
        return
    for index, example in enumerate(islice(examples, limit or None)):
        if index == MAX_STREAMED:
            raise ConfigurationError(
                f'[data] source = "{query.data.source}" has given {MAX_STREAMED:,} examples and has'
                f" no end in sight; set [training] max_examples to {MAX_STREAMED:,} or less, or"
                " return a list."
            )
        yield example


def _checked(query: Query, examples: Iterable[Example]) -> ReadResult:
    source, result = query.data.source, ReadResult(query.data)
    for index, example in enumerate(examples):
        where = f"{source} example {index}"
        if not isinstance(example, Example):
            raise ConfigurationError(
                f'[data] source = "{source}" gave a {type(example).__name__} instead of a'
                f" retrain.data.Example ({where})."
            )
        if not isinstance(example.reference, str) or _prompt(example.prompt) is None:
            result.drop(Reason.MALFORMED, where)
        elif not example.reference.strip():
            result.drop(Reason.NO_ANSWER, where)
        else:
            named = example.example_id or f"{source}-{len(result.examples)}"
            result.keep(replace(example, example_id=named), where)
    return result


SOURCES: dict[str, Callable[[Query], ReadResult]] = {
    "math": _math,
    "gsm8k": _gsm8k,
    "math500": Benchmark(HubData("HuggingFaceH4/MATH-500", split="test"), _solved_row),
    "aime24": Benchmark(HubData("HuggingFaceH4/aime_2024", split="train"), _solved_row),
    "aime25": Benchmark(HubData("yentinglin/aime_2025", split="train"), _solved_row),
    "gpqa_diamond": Benchmark(HubData("Idavidrein/gpqa", "gpqa_diamond", "train"), _gpqa_row),
    "lab": lambda query: ReadResult(query.data, lab.examples(query.split, query.data.difficulty)),
    "jsonl": partial(_local, suffixes=[".jsonl"]),
    "parquet": partial(_local, suffixes=[".parquet"]),
}
"""The built-in names of `[data] source`."""
HUB_SOURCES = SOURCES.keys() - {"lab", "jsonl", "parquet"}
"""Sources that retrain reads from the hub unless `[data] path` names a copy."""
