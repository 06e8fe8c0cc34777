"""The objective of an advantage, and its noise: exact for right-or-wrong rewards, without
a model.

`binary.xray` computes it, and `text` prints it.
"""

from retrain.xray.binary import RATES, Xray, xray

__all__ = ["RATES", "Xray", "xray"]
