"""LoRA-Squeeze: the rank that an adapter uses, and the same adapter at that rank (arXiv 2602.10993,
the post-hoc variant).

The exact singular values of each layer's update follow from a small core, so the method needs no
random numbers and no full update.
"""

from importlib.util import find_spec

from retrain.errors import EnvironmentFailure

if find_spec("torch") is None:  # retrain-core
    raise EnvironmentFailure(
        "LoRA-Squeeze and `retrain export` need torch, which retrain-core leaves out; run them"
        " with the whole of retrain."
    )

from retrain.records.summary import TableRow
from retrain.squeeze.analysis import (
    Analysis,
    LayerSpectrum,
    analyze_adapter,
    layer_spectrum,
    recommend_rank,
)
from retrain.squeeze.compression import Compression, compress_adapter, compressed_alpha
from retrain.squeeze.job import SqueezeResult, run_squeeze, squeeze_adapter

__all__ = [
    "Analysis",
    "Compression",
    "LayerSpectrum",
    "SqueezeResult",
    "TableRow",
    "analyze_adapter",
    "compress_adapter",
    "compressed_alpha",
    "layer_spectrum",
    "recommend_rank",
    "run_squeeze",
    "squeeze_adapter",
]
