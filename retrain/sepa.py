"""The promised import `retrain.sepa.SEPAController`; the controller lives in
`retrain.advantages.sepa`.
"""

from retrain.advantages.sepa import SEPAController

__all__ = ["SEPAController"]
