"""The objective that an advantage climbs, and its noise: exact for right-or-wrong rewards, without
a model.

`binary.xray` computes it, `text` prints it and `figure` draws it.
"""

from retrain.xray.binary import RATES, Xray, xray

__all__ = ["RATES", "Xray", "xray"]
