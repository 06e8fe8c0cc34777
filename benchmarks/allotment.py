"""Would held-out samples allotted to problems near 0.5 conclude sooner than the same number for
every problem?

    python benchmarks/allotment.py     # seconds

Two arms answer the same problems with four samples each on average. Allotted: n_i in proportion to
sqrt(p_i (1 - p_i)) (Neyman), from the base model's pass rate over four samples at step 0, one
sample at least; each problem still counts alike, so pass@1 stays unbiased.
"""

import argparse
from collections.abc import Iterator

import numpy as np
from report import add_output, load_average, publish, table

from retrain.analysis.statistics import Floats

SAMPLES, LUCK, DRAWS = 4, 0.02, 400


def allotted(base: Floats, total: int) -> Floats:
    """[problems] samples that add up to about `total`, from right answers [problems] of SAMPLES."""
    rate = (base + 0.5) / (SAMPLES + 1)
    weight = np.sqrt(rate * (1 - rate))
    return np.maximum(1, np.round(weight * total / weight.sum()))


def rows() -> Iterator[list[object]]:
    for spread in (1.2, 3.0, 6.0):
        for problems in (200, 500):
            for gain in (0.0, 1.0, 3.0):
                rng = np.random.default_rng(int(10 * spread) + problems)
                variances = np.zeros(4)
                for _ in range(DRAWS):
                    logits = rng.normal(-1.0, spread, problems)
                    before, after = 1 / (1 + np.exp(-logits)), 1 / (1 + np.exp(-logits - gain))
                    samples = allotted(rng.binomial(SAMPLES, before), SAMPLES * problems)
                    oracle = np.maximum(
                        1,
                        np.sqrt(after * (1 - after))
                        * SAMPLES
                        * problems
                        / np.sqrt(after * (1 - after)).sum(),
                    )
                    for index, counts in enumerate((np.full(problems, SAMPLES), samples, oracle)):
                        variances[index] += (
                            2 * (after * (1 - after) / counts).sum() / problems**2 / DRAWS
                        )
                    variances[3] += samples.mean() / DRAWS
                uniform, chosen, best = np.sqrt(variances[:3])
                whole = np.sqrt((variances[1] + 2 * LUCK**2) / (variances[0] + 2 * LUCK**2))
                yield [
                    spread,
                    problems,
                    gain,
                    f"{100 * uniform:.2f} pp",
                    f"{100 * chosen:.2f} pp",
                    f"{100 * best:.2f} pp",
                    f"{100 * (whole - 1):+.1f}%",
                    f"{variances[3]:.2f}",
                ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_output(parser)
    arguments = parser.parse_args()
    load = load_average()
    head = [
        "sd of the problems (logits)",
        "problems",
        "gain by training (logits)",
        "evaluation's sd, the same number each",
        "allotted at step 0",
        "allotted by the true rates",
        "sd of a difference, with luck of 2 pp per run",
        "samples per problem",
    ]
    about = (
        "Mean accuracy of the base 0.3 to 0.45; the sd of a difference of two arms from the"
        " sampling of answers alone."
    )
    publish(
        "allotment",
        "Samples allotted to problems near 0.5",
        [about, table(head, rows())],
        load,
        arguments.output,
    )


if __name__ == "__main__":
    main()
