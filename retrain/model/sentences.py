"""The sentence encoder of the semantic planning detector: a sentence-transformers model, from a
folder, the hub's cache or the hub.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrain.errors import EnvironmentFailure
from retrain.install import install_hint
from retrain.model.hub import why_unreachable
from retrain.model.load import no_progress_bar

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_BATCH = 128
"""Windows per encoding; they have a few dozen tokens."""

Vectors = npt.NDArray[np.floating]


@lru_cache(maxsize=1)
def load_sentence_encoder(name: str, device: str = "cpu") -> Callable[[Sequence[str]], Vectors]:
    """Load the model of this name or in this folder, once per process. It maps [n] sentences to [n,
    d] vectors of length 1.

    Raises EnvironmentFailure without sentence-transformers, and for a model that is neither here
    nor on the hub.
    """
    model = _load(name, device)

    def encode(sentences: Sequence[str]) -> Vectors:
        vectors: Any = model.encode(
            list(sentences),
            batch_size=_BATCH,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors)

    return encode


def check_encoder_package() -> None:
    """Raise EnvironmentFailure without sentence-transformers, whose import takes seconds."""
    try:
        found = find_spec("sentence_transformers")
    except ValueError:  # blocked in sys.modules
        found = None
    if found is None:
        raise _missing("sentence_transformers")


def _missing(package: str | None) -> EnvironmentFailure:
    return EnvironmentFailure(
        f'[planning] detector = "semantic" needs the extra "semantic" ({package} is missing):'
        f' {install_hint("semantic")}, or use detector = "regex".'
    )


def _load(name: str, device: str) -> "SentenceTransformer":
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise _missing(error.name) from error
    folder = Path(name)
    here = folder.is_dir()
    # Weights in a pickle could run code.
    settings: dict[str, Any] = {"device": device, "model_kwargs": {"use_safetensors": True}}
    with no_progress_bar():
        try:
            # Try the cache first, which waits for no network.
            return SentenceTransformer(
                str(folder) if here else name, local_files_only=True, **settings
            )
        except (OSError, ValueError) as error:
            if here:
                raise EnvironmentFailure(
                    f'[planning] model = "{name}" holds no sentence-transformers model:'
                    f" {_line(error)}."
                ) from error
        problem = why_unreachable()
        if problem:
            raise EnvironmentFailure(
                f'[planning] model = "{name}" is neither a folder nor in the cache, and {problem};'
                ' name a folder with the model, or use detector = "regex".'
            )
        try:
            return SentenceTransformer(name, **settings)
        except (OSError, ValueError) as error:
            raise EnvironmentFailure(
                f'[planning] model = "{name}" does not load: {_line(error)}.'
            ) from error


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")
