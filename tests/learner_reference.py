"""The policy loss written out token by token over full logits, for the learner to be compared with.

Nothing here is shared with retrain/backends/local: one row at a time, no padding, no chunks,
autograd through log_softmax.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from retrain.types import Row


def row_scores(
    model: Any, row: Row, temperature: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-prob and entropy of each action token of one row, from the model's own full logits."""
    logits = (
        model(input_ids=torch.tensor(row.token_ids.tolist()).unsqueeze(0), use_cache=False)
        .logits[0]
        .float()
        / temperature
    )
    logprobs, entropies = [], []
    for start, stop in row.spans:
        for position in range(start, stop):
            z = logits[position - 1]  # the logits before a token are those that it was drawn from
            token = int(row.token_ids[position])
            if row.kept is not None:
                z, token = z[_kept_tokens(z.detach(), token, int(row.kept[len(logprobs)]))], 0
            distribution = torch.log_softmax(z, -1)
            logprobs.append(distribution[token])
            entropies.append(-(distribution.exp() * distribution).sum())
    return logprobs, entropies


def _kept_tokens(z: torch.Tensor, token: int, count: int) -> list[int]:
    """`token` and the count - 1 most probable others, equal ones by rising id."""
    return sorted(range(len(z)), key=lambda other: (other != token, -float(z[other]), other))[
        :count
    ]


def reference_loss(
    model: Any,
    rows: Sequence[Row],
    old: Sequence[Sequence[float]],
    reference: Sequence[Sequence[float]],
    *,
    temperature: float,
    mode: str = "importance_sampling",
    low: float = 0.0,
    high: float = 0.0,
    dual_clip: float = 0.0,
    correction: str = "none",
    aggregation: str = "token_mean",
    max_tokens: int = 12,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
) -> torch.Tensor:
    sequences = []
    for row, row_old, row_reference in zip(rows, old, reference, strict=True):
        new, entropies = row_scores(model, row, temperature)
        log_ratios = [lp - was for lp, was in zip(new, row_old, strict=True)]
        whole = math.exp(sum(r.item() for r in log_ratios) / len(log_ratios))
        terms = []
        for t, lp in enumerate(new):
            advantage = float(row.advantages[t])
            if mode == "cispo":
                term = -min(max(math.exp(log_ratios[t].item()), low), high) * advantage * lp
            else:
                rho = torch.exp(log_ratios[t])
                if (
                    mode == "gspo"
                    # the value of the sequence's ratio, the gradient of the token's
                    # log-prob times it
                ):
                    rho = whole * torch.exp(lp - lp.detach())
                if mode == "importance_sampling":
                    term = -rho * advantage
                else:
                    gain = torch.minimum(
                        rho * advantage, torch.clamp(rho, 1 - low, 1 + high) * advantage
                    )
                    if dual_clip and advantage < 0:
                        gain = torch.maximum(gain, torch.tensor(dual_clip * advantage))
                    term = -gain
            w = math.exp(row_old[t] - float(row.logprobs[t]))
            if correction == "tis":
                term = term * min(w, 2.0)
            elif correction == "icepop":
                term = term * (w if 0.5 <= w <= 5.0 else 0.0)
            d = lp - row_reference[t]
            term = (
                term
                + kl_coef * {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[kl_estimator]
            )
            terms.append(term - entropy_coef * entropies[t])
        sequences.append(torch.stack(terms))
    tokens = sum(len(sequence) for sequence in sequences)
    if aggregation == "token_mean":
        return torch.cat(sequences).sum() / tokens
    if aggregation == "sequence_mean":
        return torch.stack([sequence.mean() for sequence in sequences]).mean()
    if aggregation == "constant":
        return torch.cat(sequences).sum() / (len(sequences) * max_tokens)
    return torch.cat(sequences).sum()


def sapo_objective(
    sequences: Sequence[tuple[torch.Tensor, torch.Tensor, float]], tau_pos: float, tau_neg: float
) -> torch.Tensor:
    """2511.20347: mean over sequences of the mean over tokens of f(r_t) A, f(x) = sigmoid(tau (x -
    1)) 4 / tau. (new, old, A) each.
    """
    means = []
    for new, old, advantage in sequences:
        tau = tau_pos if advantage > 0 else tau_neg
        means.append(
            sum(
                4 / tau / (1 + torch.exp(-tau * (torch.exp(n - o) - 1))) * advantage
                for n, o in zip(new, old, strict=True)
            )
            / len(new)
        )
    return torch.stack(means).mean()


def gmpo_objective(
    sequences: Sequence[tuple[torch.Tensor, torch.Tensor, float]], low: float, high: float
) -> torch.Tensor:
    """2507.20673: mean over sequences of (prod_t |min(r_t A, clip(r_t, e^-low, e^high) A)|)^(1/T)
    sign(A).
    """
    means = []
    for new, old, advantage in sequences:
        ratios = torch.exp(new - old)
        smaller = torch.minimum(
            ratios * advantage, ratios.clamp(math.exp(-low), math.exp(high)) * advantage
        )
        means.append(math.copysign(1, advantage) * smaller.abs().prod() ** (1 / len(new)))
    return torch.stack(means).mean()


def dppo_objective(
    sequences: Sequence[tuple[torch.Tensor, torch.Tensor, float]],
    low: float,
    high: float,
    cap: float,
) -> torch.Tensor:
    """2602.04879 with the binary total variation: mean over tokens of M_t min(r_t, cap) A log pi_t,
    M_t = 0 where the probability has moved out of the trust region in the advantage's direction.
    """
    terms = []
    for new, old, advantage in sequences:
        for n, o in zip(new, old, strict=True):
            moved = math.exp(n.item()) - math.exp(o.item())
            inside = moved <= high if advantage > 0 else moved >= -low
            terms.append(float(inside) * min(math.exp(n.item() - o.item()), cap) * advantage * n)
    return torch.stack(terms).mean()
