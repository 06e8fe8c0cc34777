"""The token-credit viewer: the advantage of every token of a step and where it comes from, in a
terminal or in the report.
"""

from enum import StrEnum


class Quantity(StrEnum):
    """The quantities that can color a token. Advantages and log-ratios have a sign; the others are
    0 or more.
    """

    ADVANTAGE = "advantage"
    SURPRISAL = "surprisal"
    ENTROPY = "entropy"
    LOG_RATIO = "log-ratio"
