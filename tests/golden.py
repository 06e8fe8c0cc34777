"""Runs numeric cases against the public functions: `python tests/golden.py FILE...` prints the
mismatches and exits 1 if there are any.

A file holds {"default_tol": {rtol, atol}, "cases": [{id, op, inputs, expected, tol?}]}; an expected
{"error": "ValueError"} must raise it. An operation that is not known is a mismatch.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrain.advantages import planning, transforms
from retrain.advantages.episode import ADVANTAGES, grpo, grpo_std, maxrl, reinforce_pp, rloo
from retrain.advantages.pipeline import CreditPipeline
from retrain.advantages.sepa import SEPAController, check_ramp
from retrain.advantages.step import Segments, StepTokens, flatten
from retrain.analysis import pairs as tasks
from retrain.analysis import statistics
from retrain.backends.local import loss
from retrain.backends.losses import ActionTokens
from retrain.backends.rows import sequence_weights
from retrain.backpressure import capacity, fit_scaling_law, optimal_concurrency, target_batch
from retrain.config import TrainConfig
from retrain.config.schema import Loss, Sepa
from retrain.config.values import parse_grams
from retrain.records.evaluation import pass_at_k
from retrain.rewards import extract_boxed, hendrycks_is_equiv
from retrain.squeeze import compressed_alpha, layer_spectrum, recommend_rank
from retrain.squeeze.adapter import LoraLayer
from retrain.squeeze.analysis import factorize, tried_ranks
from retrain.squeeze.compression import truncated

TEXT_INPUTS = frozenset({"text", "a", "b", "token_pieces", "grams"})
"""Inputs in which "nan" and "inf" are words, not numbers."""
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Rows = list[list[float]]


def expected_gradient_coefficient(mode: str, N: int, p: float, eps: float) -> float:
    """E[mean_i A_i score_i] / (p (1 - p)) over K ~ Bin(N, p) successes, where the score is 1 - p
    for a success and -p for a failure.
    """
    builtin = ADVANTAGES[mode]
    params = {"eps": eps} if "eps" in builtin.parameters else {}
    total = 0.0
    for successes in range(N + 1):
        rewards = [1.0] * successes + [0.0] * (N - successes)
        advantages: Any = (
            builtin.function([rewards], **params)[0]
            if builtin.batch_level
            else builtin.function(rewards, **params)
        )
        scores = [1.0 - p] * successes + [-p] * (N - successes)
        probability = math.comb(N, successes) * p**successes * (1.0 - p) ** (N - successes)
        total += probability * math.fsum(a * s for a, s in zip(advantages, scores, strict=True)) / N
    return total / (p * (1.0 - p))


def shannon_entropy_from_logits(
    logits: Sequence[float], temperature: float = 1.0, cap: float = transforms.CAP
) -> float:
    """Entropy in nats of softmax(logits / temperature), [V] -> a float; a logit of -inf is a token
    that cannot come.

    Raises ValueError on no logits, NaN, +inf, all -inf, or a temperature that is not positive.
    """
    z = np.asarray(logits, dtype=np.float64)
    if np.isnan(z).any():
        raise ValueError("a logit is NaN")
    if not (np.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}, it must be a positive number")
    if len(z) == 0 or z.max() == np.inf or z.max() == -np.inf:
        raise ValueError("the largest logit must be a finite number")
    z = (z[np.isfinite(z)] - z.max()) / temperature
    log_p = z - np.log(np.exp(z).sum())
    return float(np.clip(-(np.exp(log_p) * log_p).sum(), 0.0, cap))


def sepa(change: transforms.FlatEntropyTransform) -> Callable[..., list[float]]:
    def operation(uncertainty: list[float], mask: list[int], lam: float, cap: float) -> list[float]:
        h = capped(uncertainty, cap)
        changed: list[float] = change(
            h, np.array(mask, dtype=np.bool_), Segments([len(h)]), lam
        ).tolist()
        return changed

    return operation


def capped(values: list[float], cap: float) -> Any:
    return transforms.capped(np.array(values, dtype=np.float64), cap)


def gtpo(
    advantage: float, uncertainty: list[float], beta: float, cap: float = transforms.CAP
) -> list[float]:
    """A_t = A w_t for one completion, its uncertainty [T] capped first."""
    if not math.isfinite(advantage):
        raise ValueError(f"the advantage is {advantage}, it must be a finite number")
    weights = transforms.gtpo_weights(capped(uncertainty, cap), Segments([len(uncertainty)]), beta)
    return [advantage * weight for weight in weights.tolist()]


def hicra(token_advantages: list[float], mask: list[int], alpha: float) -> list[float]:
    result: list[float] = transforms.hicra(
        np.array(token_advantages, dtype=np.float64), np.array(mask, dtype=np.bool_), alpha
    ).tolist()
    return result


def planning_regex(token_pieces: list[str], grams: str) -> list[int]:
    chosen = [] if grams == "default18" else parse_grams(grams)
    return [int(mark) for mark in planning.RegexDetector(chosen).detect(token_pieces)]


def sepa_trace(config: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    settings = Sepa(**config)
    check_ramp(settings)
    controller = SEPAController(settings)
    lambdas = []
    for event in events:
        lambdas.append(controller.resolve(event["step"]))
        controller.observe(event["correct_rate"], event["step"])
        controller.update_auto(event["exec_uncertainty"])
    return {"lambda": lambdas, "state": controller.state_dict()}


def pipeline(
    rewards: list[float],
    logprobs: Rows,
    masks: list[list[int]],
    advantage_mode: str,
    transform_mode: str,
    beta: float,
    alpha: float,
    lam: float,
) -> Rows:
    config = TrainConfig.model_validate(
        {
            "algorithm": {"advantage_mode": advantage_mode, "transform_mode": transform_mode},
            "gtpo": {"beta": beta},
            "hicra": {"alpha": alpha},
        }
    )
    segments = Segments([len(row) for row in logprobs])
    tokens = StepTokens(
        rewards=[rewards],
        segments=segments,
        logprobs=flatten(logprobs),
        entropies=None,
        planning=flatten(masks).astype(np.bool_),
        in_loss=np.ones(len(logprobs), dtype=np.bool_),
    )
    assigned = CreditPipeline(config, lambda ids: [""] * len(ids)).compute(tokens, 0, lam)
    return [piece.tolist() for piece in segments.split(assigned.final)]


def surprisal_mask(uncertainty: Rows, rho: float, scope: str) -> dict[str, Any]:
    segments = Segments([len(row) for row in uncertainty])
    single = scope != "completion"
    pools = (
        np.zeros(segments.total, dtype=np.int64)
        if single
        else np.repeat(np.arange(len(segments)), segments.lengths)
    )
    result = transforms.top_rho(flatten(uncertainty), pools, 1 if single else len(segments), rho)
    keep = [row.astype(int).tolist() for row in segments.split(result.keep.astype(np.float64))]
    return {"keep": keep, "threshold": result.thresholds[0] if single else result.thresholds}


def batch(rows: Rows) -> tuple[torch.Tensor, list[int]]:
    lengths = [len(row) for row in rows]
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64), lengths


def cut(values: torch.Tensor, lengths: Sequence[int]) -> Rows:
    return [piece.tolist() for piece in torch.split(values, list(lengths))]


def token_weights(lengths: Sequence[int], aggregation: Any, max_tokens: int = 0) -> torch.Tensor:
    """[N] float64: the weight of each action token of a whole batch."""
    weights = torch.tensor(sequence_weights(lengths, aggregation, max_tokens), dtype=torch.float64)
    return weights.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))


def whole_batch_loss(
    new: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    lengths: Sequence[int],
    max_tokens: int = 0,
    **settings: Any,
) -> torch.Tensor:
    """The scalar loss of flat [N] tensors under `[loss]` with these settings."""
    chosen = Loss(**settings)
    weights = token_weights(lengths, chosen.aggregation, max_tokens).to(new)
    return loss.policy_loss(ActionTokens(new, old, old, advantages, weights, lengths), chosen)


def policy(mode: str) -> Callable[..., float]:
    def operation(new: Rows, old: Rows, adv: Rows, max_tokens: int = 0, **settings: Any) -> float:
        values, lengths = batch(new)
        return float(
            whole_batch_loss(
                values, batch(old)[0], batch(adv)[0], lengths, max_tokens, mode=mode, **settings
            )
        )

    return operation


CLAMP = Loss().log_ratio_clamp


def gspo_ratio(new: Rows, old: Rows) -> list[float]:
    values, lengths = batch(new)
    ratios: list[float] = loss.gspo_ratio(values, batch(old)[0], lengths, CLAMP).tolist()
    return ratios


def cispo_weight(new: Rows, old: Rows, low: float, high: float) -> Rows:
    values, lengths = batch(new)
    return cut(loss.cispo_weight(values, batch(old)[0], low, high, CLAMP), lengths)


def correction(train: Rows, sampler: Rows, **settings: Any) -> Rows:
    old, lengths = batch(train)
    tokens = ActionTokens(old, old, batch(sampler)[0], old, old, lengths)
    found = loss.correction_weight(tokens, Loss(**settings))
    assert found is not None
    return cut(found, lengths)


def tis_weight(train: Rows, sampler: Rows, cap: float) -> Rows:
    return correction(train, sampler, correction="tis", correction_cap=cap)


def icepop_weight(train: Rows, sampler: Rows, low: float, high: float) -> Rows:
    bounds = {"correction_low": low, "correction_high": high}
    return correction(train, sampler, correction="icepop", **bounds)


def usl_throughput(p: float, sigma: float, kappa: float, **scale: float) -> float:
    return scale.get("lambda", 1.0) * capacity(p, sigma, kappa)


def usl_fit(p: list[float], throughput: list[float], **options: Any) -> dict[str, Any]:
    fit = fit_scaling_law(p, throughput, **options)
    law = fit.law
    numbers = (
        {"lambda": law.lam, "sigma": law.sigma, "kappa": law.kappa, "p_star": law.optimum}
        if law
        else {}
    )
    return {"status": fit.status, "r2": fit.r2, "superlinear": fit.superlinear, **numbers}


def usl_target_batch(p_star: float | None, **settings: Any) -> int:
    return target_batch(math.inf if p_star is None else p_star, **settings)


def squeeze_layer(lora_A: Rows, lora_B: Rows, target_ranks: list[int]) -> dict[str, Any]:
    layer = layer_spectrum(
        torch.tensor(lora_A, dtype=torch.float64), torch.tensor(lora_B, dtype=torch.float64)
    )
    # A layer may be of a lower rank than its adapter, so the largest target stands for the
    # adapter's.
    ranks = tried_ranks(target_ranks, max([layer.rank, *target_ranks]))
    variance = None if layer.is_zero else {str(k): layer.retained(k) for k in ranks}
    return {
        "singular_values": layer.singular_values,
        "variance": variance,
        "status": "zero" if layer.is_zero else "ok",
    }


def squeeze_compress(lora_A: Rows, lora_B: Rows, rank: int) -> dict[str, Any]:
    a, b = torch.tensor(lora_A, dtype=torch.float64), torch.tensor(lora_B, dtype=torch.float64)
    layer = LoraLayer(
        "layer", a, b, alpha=compressed_alpha(1.0, len(lora_A), rank), use_rslora=False
    )
    short_a, short_b = truncated(layer, factorize(a, b, "layer"), rank)
    return {
        "product": (short_b @ short_a).tolist(),
        "relative_frobenius_error": math.sqrt(layer_spectrum(a, b).lost(rank)),
    }


def squeeze_recommend(
    layers: list[dict[str, float]],
    ranks: list[int],
    min_variance_retention: float,
    rule: Any,
    source_rank: int | None = None,
) -> int:
    retained = [{int(k): v for k, v in layer.items()} for layer in layers]
    return recommend_rank(
        retained, sorted(ranks), min_variance_retention, rule, source_rank or max(ranks)
    )


def sign_flip_p(differences: Iterable[float]) -> float:
    return statistics.max_t([dict(enumerate(differences))])[0]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "advantage.grpo": grpo,
    "advantage.maxrl": maxrl,
    "advantage.rloo": rloo,
    "advantage.grpo_std": grpo_std,
    "advantage.reinforce_pp": reinforce_pp,
    "property.expected_gradient_coefficient": expected_gradient_coefficient,
    "transform.gtpo": gtpo,
    "transform.hicra": hicra,
    "planning.regex": planning_regex,
    "transform.sepa_pool": sepa(transforms.sepa_pool),
    "transform.sepa_amp": sepa(transforms.sepa_amplify),
    "transform.sepa_amp_clamped": sepa(transforms.sepa_amplify_clamped),
    "sepa.trace": sepa_trace,
    "pipeline": pipeline,
    "uncertainty.surprisal": (
        lambda logprobs, cap=transforms.CAP: transforms.surprisal(logprobs, cap).tolist()
    ),
    "uncertainty.predictive_variance": (
        lambda logprobs: transforms.predictive_variance(logprobs).tolist()
    ),
    "uncertainty.shannon_entropy_from_logits": shannon_entropy_from_logits,
    "transform.surprisal_mask": surprisal_mask,
    "transform.surprisal_mask_count": lambda n, rho: [
        transforms.kept_count(*pair) for pair in zip(n, rho, strict=True)
    ],
    "loss.importance_sampling": policy("importance_sampling"),
    "loss.ppo_clip": policy("ppo"),
    "loss.gspo_ratio": gspo_ratio,
    "loss.cispo_weight": cispo_weight,
    "loss.tis_weight": tis_weight,
    "loss.icepop_weight": icepop_weight,
    "reward.extract_boxed": extract_boxed,
    "reward.hendrycks_is_equiv": hendrycks_is_equiv,
    "usl.throughput": usl_throughput,
    "usl.optimal": optimal_concurrency,
    "usl.fit": usl_fit,
    "usl.target_batch": usl_target_batch,
    "squeeze.layer": squeeze_layer,
    "squeeze.compress": squeeze_compress,
    "squeeze.recommend": squeeze_recommend,
    "squeeze.alpha": compressed_alpha,
    "stats.pass_at_k": pass_at_k,
    "stats.paired_permutation": sign_flip_p,
    "stats.cohen_dz": statistics.corrected_dz,
    "stats.holm": statistics.holm,
    "stats.iqm": tasks.iqm,
}


def numeric(value: Any) -> Any:
    """An input with its words for floats replaced."""
    if isinstance(value, str):
        return FLOATS.get(value, value)
    if isinstance(value, list):
        return [numeric(item) for item in value]
    if isinstance(value, dict):
        return {key: numeric(item) for key, item in value.items()}
    return value


def difference(expected: Any, got: Any, rtol: float, atol: float, path: str = "") -> str:
    """Where and how the two differ first; "" if they agree. Keys that are not expected do not
    matter.
    """
    if isinstance(expected, dict) and isinstance(got, dict):
        pairs = [(f"{path}.{key}", value, got.get(key)) for key, value in expected.items()]
    elif isinstance(expected, list) and isinstance(got, list | tuple):
        if len(expected) != len(got):
            return f"{path or 'result'}: {len(got)} items, expected {len(expected)}"
        pairs = [
            (f"{path}[{index}]", *pair)
            for index, pair in enumerate(zip(expected, got, strict=True))
        ]
    else:
        return (
            ""
            if same(expected, got, rtol, atol)
            else f"{path or 'result'}: {got!r}, expected {expected!r}"
        )
    return next(
        (found for where, e, g in pairs if (found := difference(e, g, rtol, atol, where))), ""
    )


def same(expected: Any, got: Any, rtol: float, atol: float) -> bool:
    expected = (
        FLOATS.get(expected, expected)
        if isinstance(expected, str) and not isinstance(got, str)
        else expected
    )
    if expected is None:
        return got is None or got == math.inf  # JSON has no infinity
    if isinstance(expected, bool) or isinstance(got, bool) or isinstance(expected, str):
        return type(expected) is type(got) and bool(expected == got)
    if not isinstance(got, int | float):
        return False
    if math.isnan(expected) or math.isinf(expected):
        return (math.isnan(expected) and math.isnan(got)) or bool(expected == got)
    return bool(abs(got - expected) <= atol + rtol * abs(expected))


def check(case: dict[str, Any], tolerance: dict[str, float]) -> str:
    """The mismatch of one case in words; "" if there is none."""
    inputs = {
        key: value if key in TEXT_INPUTS else numeric(value)
        for key, value in case["inputs"].items()
    }
    expected = case["expected"]
    error = expected.get("error") if isinstance(expected, dict) else None
    try:
        got = OPERATIONS[case["op"]](**inputs)
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as raised:
        kinds = {kind.__name__ for kind in type(raised).__mro__}
        return (
            ""
            if error in kinds
            else f"raised {type(raised).__name__}: {raised}, expected {error or expected!r}"
        )
    if error:
        return f"gave {got!r}, expected {error}"
    return difference(expected, got, tolerance["rtol"], tolerance["atol"])


def run(path: Path) -> tuple[int, int]:
    """(cases, mismatches); prints each mismatch."""
    document = json.loads(path.read_text())
    mismatches = 0
    for case in document["cases"]:
        problem = (
            check(case, document["default_tol"] | case.get("tol", {}))
            if case["op"] in OPERATIONS
            else "unknown operation"
        )
        if problem:
            mismatches += 1
            print(f"{path}: {case['id']} ({case['op']}): {problem}")
    return len(document["cases"]), mismatches


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print("usage: python tests/golden.py FILE...", file=sys.stderr)
        return 2
    failed = False
    for name in arguments:
        cases, mismatches = run(Path(name))
        print(f"{name}: {cases - mismatches} of {cases} cases agree")
        failed = failed or mismatches > 0
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
