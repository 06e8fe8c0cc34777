"""Rows of data files and of hub data sets, each with its place for messages."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from retrain.config.names import DATA_FILE_SUFFIXES
from retrain.errors import ConfigurationError, EnvironmentFailure, first_line
from retrain.model import hub
from retrain.system import Json, integer_or_digits, parse_json

Split = Literal["train", "heldout"]

HELDOUT_WORDS = (("test",), ("heldout", "held"), ("validation", "valid", "val", "dev", "eval"))
"""Words in a file's name that mark held-out data. If a folder has several kinds, the first in this
order counts.
"""


@dataclass(frozen=True)
class RawRow:
    """One row of a data set, not yet an example."""

    where: str
    """The row's place as messages name it: "train.jsonl line 17"."""
    example_id: str
    """The id of the example made from the row: "train-16"."""
    columns: dict[str, Any] | None
    """The row's values by column; None for a line that is not a JSON object."""
    repeated: str = ""
    """A key that the line gives twice, with different values; the last one counts."""


# ---- files ---------------------------------------------------------------------------------------

Files = tuple[Path, ...]


def find_files(
    path: Path, key: str, suffixes: Sequence[str] = DATA_FILE_SUFFIXES, prefer: str = ""
) -> tuple[Files, Files]:
    """Find the training files and the held-out files at `path`, a file or a folder (searched
    recursively).

    The name of a file (train*.jsonl; test*, heldout*, validation*) or of its folder gives the
    split. Without a held-out file, the first tuple has all files, and the second tuple is empty. If
    some names contain `prefer`, the function ignores the other files, since several data sets may
    share a folder. Messages name `key` as the origin of the path. Raises ConfigurationError if
    nothing is there.
    """
    if path.is_file():
        return (path,), ()
    if not path.is_dir():
        places = ""
        if not path.is_absolute():
            places = f" in {Path.cwd()}, the current folder, or beside the configuration file"
        raise ConfigurationError(
            f"{key} does not exist{places}; name a .jsonl or .parquet file or a folder of them, or"
            " hub:NAME for a hub data set."
        )
    files = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
    files = [file for file in files if prefer and prefer in file.name.lower()] or files
    if not files:
        raise ConfigurationError(
            f"{key} holds no {' or '.join(suffixes)} file; name a file, or a folder of them."
        )
    if len({file.suffix for file in files}) > 1:
        raise ConfigurationError(
            f"{key} holds both .jsonl and .parquet files, possibly of the same rows; set source ="
            ' "jsonl" or "parquet", and path.'
        )
    words = {file: _split_word(file.relative_to(path)) for file in files}
    train = tuple(file for file in files if words[file] == "train")
    for kind in HELDOUT_WORDS:
        heldout = tuple(file for file in files if words[file] in kind)
        if heldout and train:
            return train, heldout
    return train or tuple(files), ()


def _split_word(relative: Path) -> str:
    """Return the word that names a file's split, in its own name or in the nearest folder's; "" if
    there is none.
    """
    known = {"train", *chain.from_iterable(HELDOUT_WORDS)}
    for part in (relative.stem, *reversed(relative.parent.parts)):
        found = [word for word in re.split(r"[^a-z]+", part.lower()) if word in known]
        if found:
            return found[0]
    return ""


def read_files(files: Iterable[Path]) -> Iterator[RawRow]:
    """Yield the rows of .jsonl and .parquet files, in order."""
    for file in files:
        if file.suffix == ".parquet":
            yield from _read_parquet(file)
        else:
            yield from _read_jsonl(file)


def _read_jsonl(file: Path) -> Iterator[RawRow]:
    def table(pairs: list[tuple[str, Any]]) -> Json:
        values = dict(pairs)
        if len(values) < len(pairs):
            repeated.extend(name for name, value in pairs if value != values[name])
        return values

    with file.open("rb") as lines:
        for index, line in enumerate(lines):
            if not line.strip():
                continue
            repeated: list[str] = []
            try:
                # Joined files have a byte order mark in the middle too.
                text = line.decode("utf-8-sig")
                columns = parse_json(text, parse_int=integer_or_digits, object_pairs_hook=table)
            except ValueError:  # bytes that are not UTF-8 or not JSON
                columns = None
            yield RawRow(
                f"{file.name} line {index + 1}",
                f"{file.stem}-{index}",
                columns if isinstance(columns, dict) else None,
                "".join(repeated[:1]),
            )


def _read_parquet(file: Path) -> Iterator[RawRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise EnvironmentFailure(
            f"Reading {file} needs pyarrow: pip install pyarrow, or give the data as .jsonl."
        ) from error
    try:
        table = parquet.ParquetFile(file)
        rows = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches())
        for index, row in enumerate(_as_stored(rows, table.schema_arrow)):
            yield RawRow(f"{file.name} row {index}", f"{file.stem}-{index}", row)
    except (ArrowException, OSError) as error:
        reason = first_line(error).rstrip(".")
        raise ConfigurationError(
            f"{file} is not a readable parquet file ({reason}); write it again, or give the"
            " rows as .jsonl."
        ) from error


_NARROW = {"halffloat": np.float16, "float": np.float32}


def _as_stored(rows: Iterable[dict[str, Any]], schema: Any) -> Iterator[dict[str, Any]]:
    """Yield rows with the digits of their type: 0.1 of a float16, and not 0.0999755859375."""
    narrow = [(one.name, _NARROW[str(one.type)]) for one in schema if str(one.type) in _NARROW]
    for row in rows:
        yield row | {name: row[name] and float(str(kind(row[name]))) for name, kind in narrow}


# ---- the hub -------------------------------------------------------------------------------------


class NoSplit(ConfigurationError):
    """The data set lacks the requested split."""


@dataclass(frozen=True)
class HubData:
    """A data set on the Hugging Face hub: hub:NAME[:config][:split]."""

    name: str
    config: str = ""
    split: str = ""

    @classmethod
    def parse(cls, source: str) -> "HubData":
        """Parse hub:NAME[:config][:split]. A single part after the name is a split if it has the
        name of one, or else a configuration; hub:NAME::SPLIT is always a split.
        """
        parts = source.removeprefix("hub:").split(":")
        if not parts[0] or len(parts) > 3:
            raise ConfigurationError(
                f'[data] source = "{source}" is not of the form hub:NAME[:config][:split], such as'
                " hub:openai/gsm8k:main:train."
            )
        name, config, split = [*parts, "", ""][:3]
        if not split and config in ("train", "test", "validation"):
            config, split = "", config
        return cls(name, config, split)

    def __str__(self) -> str:
        return ":".join(part for part in (f"hub:{self.name}", self.config, self.split) if part)


def read_hub(data: HubData, splits: Iterable[str]) -> Iterator[RawRow]:
    """Yield the rows of the first of `splits` that the data set has.

    Raises NoSplit if it has none of them. Raises EnvironmentFailure if the hub does not answer and
    its cache lacks the data set, and ConfigurationError for any other reason that the hub gives.
    """
    for split in splits:
        rows = _load_split(data, split)
        if rows is None:
            continue
        stem = "-".join(part for part in (data.name.rpartition("/")[2], data.config, split) if part)
        for index, row in enumerate(rows):
            yield RawRow(f"{data.name} {split} row {index}", f"{stem}-{index}", row)
        return
    raise NoSplit(f"{data} has no split named {' or '.join(splits)}")


def _load_split(data: HubData, split: str) -> Any:
    """Load the rows of a split; None if the data set has no such split."""
    online = hub.reachable()
    try:
        import datasets
    except ImportError as error:
        raise EnvironmentFailure(
            f"Loading {data} needs the datasets library: pip install datasets, or set [data] path"
            " to a local copy."
        ) from error
    try:
        rows = datasets.load_dataset(data.name, data.config or None, split=split)
        return _as_stored(rows, rows.features.arrow_schema)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = first_line(error)
        if "split" in reason.lower() and isinstance(error, ValueError):
            return None
        if online:
            raise ConfigurationError(
                f"[data] source {data} did not load from the Hugging Face hub: {reason}"
            ) from error
        raise EnvironmentFailure(
            f"[data] source: {data} is not in the hub's cache, and {hub.why_unreachable()}."
            " Offline, set [data] path to a local copy (.jsonl or .parquet), or source ="
            ' "lab".'
        ) from error
