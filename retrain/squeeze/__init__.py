"""LoRA-Squeeze: which rank an adapter really uses, and the same adapter at that rank (arXiv 2602.10993, the post-hoc variant).

A small core of each layer gives the exact singular values of its update, so nothing here is randomised and no update is ever built.
"""

from retrain.records.summary import TableRow
from retrain.squeeze.analysis import Analysis, analyze_adapter, recommend_rank
from retrain.squeeze.compression import Compression, compress_adapter, compressed_alpha
from retrain.squeeze.job import Squeezed, run_squeeze, squeeze_adapter
from retrain.squeeze.spectrum import LayerSpectrum, layer_spectrum

__all__ = [
    "Analysis",
    "Compression",
    "LayerSpectrum",
    "Squeezed",
    "TableRow",
    "analyze_adapter",
    "compress_adapter",
    "compressed_alpha",
    "layer_spectrum",
    "recommend_rank",
    "run_squeeze",
    "squeeze_adapter",
]
