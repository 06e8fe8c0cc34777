"""The built-in engines and backends as a list: what each is, how it is installed, and against what
it was verified.

What they run on is not imported: versions come from the installed packages' metadata.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from retrain.backends.base import BACKENDS, Backend, BackendCapabilities, backend_kind
from retrain.backends.declared import backend_words, engine_words
from retrain.config.effects import BACKEND_SECTIONS, ENGINE_SECTIONS, Outcome, effects_of
from retrain.config.keys import all_keys
from retrain.inference_engine.base import (
    ENGINES,
    EngineCapabilities,
    InferenceEngine,
    engine_kind,
)
from retrain.install import install_hint

Kind = Literal["backend", "engine"]


@dataclass(frozen=True)
class KeyRow:
    """The outcome of one key."""

    key: str
    """As "section.key"."""
    use: Outcome
    because: str
    values: tuple[Any, ...]
    """The values that this is about; empty: all that are not the default."""


@dataclass(frozen=True)
class Entry:
    """One engine or backend."""

    kind: Kind
    name: str
    what: str
    packages: tuple[str, ...]
    """Distributions that it runs on: here, or for a server where that runs."""
    install: str
    """A command, or a sentence."""
    verified: str
    """Against what its tests run. contract: a stand-in written from the documented API."""

    @property
    def capabilities(self) -> BackendCapabilities | EngineCapabilities:
        part = backend_kind(self.name) if self.kind == "backend" else engine_kind(self.name)
        return part.capabilities

    @property
    def words(self) -> str:
        """Its capabilities in a few words."""
        declared = self.capabilities
        if isinstance(declared, BackendCapabilities):
            return backend_words(declared)
        return engine_words(declared)

    @property
    def installed(self) -> dict[str, str | None]:
        """Its packages in this environment."""
        return {name: _version(name) for name in self.packages}

    @property
    def keys(self) -> list[KeyRow]:
        """The outcome of every key of its sections, in the order of the schema."""
        table = effects_of(self.kind, self.name)
        sections = BACKEND_SECTIONS if self.kind == "backend" else ENGINE_SECTIONS
        rows: list[KeyRow] = []
        for path in (key.path for key in all_keys() if key.section in sections):
            for row in table:
                if row.covers(path):
                    found = KeyRow(path, row.outcome, row.because, row.values)
                    if found not in rows:
                        rows.append(found)
                    if not row.values and row.when is None:  # it holds for every value
                        break
        return rows

    def to_json(self) -> dict[str, Any]:
        more = {"installed": self.installed, "capabilities": asdict(self.capabilities)}
        return asdict(self) | more | {"keys": [asdict(row) for row in self.keys]}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def catalogue() -> Iterator[Entry]:
    """Yield the built-in backends, then the engines."""
    kinds: dict[Kind, dict[str, type[Backend | InferenceEngine]]] = {
        "backend": {name: backend_kind(name) for name in BACKENDS},
        "engine": {name: engine_kind(name) for name in ENGINES},
    }
    for kind, parts in kinds.items():
        for name, part in parts.items():
            about = part.about
            install = about.install or install_hint(about.extra)
            yield Entry(kind, name, about.what, about.packages, install, about.verified)
