"""Slow second implementations, written from the papers: plain loops over one row in Python floats, or in decimals.

Nothing here imports rlhf_core (a test sees to it), and the forms differ on purpose: GAE is the double sum and not the
recursion, padding is handled by a carry-forward mask and not by offsets, k3 has 60 digits.
"""

import math
import statistics
from collections.abc import Sequence
from decimal import Decimal, localcontext

Row = Sequence[float]


def kl(logprob: float, ref_logprob: float, estimator: str, cap: float = 20.0) -> float:
    """One token's KL estimate; k3 in 60 digits, its log-ratio bounded below by -cap."""
    with localcontext() as context:
        context.prec = 60
        d = Decimal(logprob) - Decimal(ref_logprob)
        if estimator == "k1":
            return float(d)
        if estimator == "k2":
            return float(d * d / 2)
        if estimator == "absolute":
            return float(abs(d))
        d = max(d, Decimal(-cap))
        return float((-d).exp() - 1 + d)


def rewards(kls: Row, score: float, kl_coef: float) -> list[float]:
    """One row: the penalty on each token, the score on the last."""
    out = [-kl_coef * value for value in kls]
    if out:
        out[len(out) - 1] = out[len(out) - 1] + score
    return out


def td_errors(row_rewards: Row, values: Row, gamma: float) -> list[float]:
    """One row: r_t + gamma V_{t+1} - V_t, with V = 0 after the end."""
    after = [*values[1:], 0.0]
    return [r + gamma * v_next - v for r, v_next, v in zip(row_rewards, after, values, strict=False)]


def gae(row_rewards: Row, values: Row, gamma: float, gae_lambda: float) -> list[float]:
    """One row, as the sum that defines it: A_t = sum over l of (gamma lambda)^l delta_{t+l}."""
    deltas = td_errors(row_rewards, values, gamma)
    return [
        math.fsum((gamma * gae_lambda) ** (u - t) * deltas[u] for u in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def discounted_returns(row_rewards: Row, gamma: float) -> list[float]:
    """One row: sum over l of gamma^l r_{t+l}."""
    return [
        math.fsum(gamma ** (u - t) * row_rewards[u] for u in range(t, len(row_rewards)))
        for t in range(len(row_rewards))
    ]


def gae_padded(row_rewards: Row, values: Row, mask: Sequence[bool], gamma: float, gae_lambda: float) -> list[float]:
    """One row stored with padding: what is carried backwards does not change at masked positions. 0 at padding."""
    out = [0.0] * len(row_rewards)
    next_value, next_advantage = 0.0, 0.0
    for t in reversed(range(len(row_rewards))):
        if mask[t]:
            delta = row_rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * gae_lambda * next_advantage
            next_value = values[t]
            out[t] = next_advantage
    return out


def whiten(
    x: Row, *, shift_mean: bool = True, bessel: bool = False, floor: bool = False, epsilon: float = 1e-8
) -> list[float]:
    """Exact sums; population variance unless told; epsilon added to it, or the least that it may be."""
    if min(x) == max(x):
        return [0.0 if shift_mean else x[0]] * len(x)
    mean = math.fsum(x) / len(x)
    variance = math.fsum((value - mean) ** 2 for value in x) / (len(x) - bessel)
    scale = math.sqrt(max(variance, epsilon) if floor else variance + epsilon)
    return [(value - mean) / scale + (0.0 if shift_mean else mean) for value in x]


def group_advantage(total: float, others: Row, estimator: str, epsilon: float) -> float:
    """One response against the other responses to its prompt, by definition: a sum over the others, or a z-score."""
    group = [total, *others]
    if min(group) == max(group):
        return 0.0
    if estimator == "rloo":
        return total - math.fsum(others) / len(others)
    mean = math.fsum(group) / len(group)
    if estimator == "grpo":
        return (total - mean) / (statistics.stdev(group) + epsilon)
    return total - mean


def advantages(
    row_rewards: Row, values: Row, others: Row, estimator: str, gamma: float, gae_lambda: float, epsilon: float
) -> list[float]:
    """One row by any estimator; `others` are the sums of rewards of the rest of its group."""
    total = math.fsum(row_rewards)
    if estimator == "gae":
        return gae(row_rewards, values, gamma, gae_lambda)
    if estimator == "reward_minus_value":
        return [total - value for value in values]
    if estimator == "reinforce_plus_plus":
        return discounted_returns(row_rewards, gamma)
    return [group_advantage(total, others, estimator, epsilon)] * len(row_rewards)


def importance_weights(sampler: Row, logprobs: Row, correction: str, low: float, high: float) -> list[float]:
    """One row: proximal over behaviour, and what each correction makes of it."""
    ratios = [math.exp(max(-20.0, min(20.0, new - old))) for new, old in zip(logprobs, sampler, strict=True)]
    if correction == "none" or not ratios:
        return [1.0] * len(ratios)
    if correction == "mask":
        return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    geometric = math.prod(ratio ** (1 / len(ratios)) for ratio in ratios)
    kept = correction == "truncate" or low <= geometric <= high
    return [min(ratio, high) if kept else 0.0 for ratio in ratios]


def overlong_penalty(length: int, longest: int, buffer: int, penalty: float) -> float:
    """The three cases of DAPO's soft punishment."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return penalty * (length - (longest - buffer)) / buffer
    return penalty


def policy_loss(
    log_ratio: float, advantage: float, low: float, high: float, dual: float | None = None, weight: float = 1.0
) -> float:
    """One token, by cases: what is clipped depends on the sign of the advantage."""
    ratio = math.exp(log_ratio)
    if advantage >= 0:
        return weight * -advantage * min(ratio, 1 + high)
    return weight * -advantage * min(max(ratio, 1 - low), math.inf if dual is None else dual)


def policy_slope(log_ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    """One token's derivative of policy_loss by the log-ratio: -A * ratio where no bound is active, else 0."""
    ratio = math.exp(log_ratio)
    if advantage >= 0:
        inside = ratio < 1 + high
    else:
        inside = ratio > 1 - low and (dual is None or ratio < dual)
    return -advantage * ratio if inside else 0.0


def sequence_log_ratio(new_logprobs: Row, logprobs: Row) -> float:
    """One response: the log of the geometric mean of its token ratios."""
    product = math.prod(math.exp(new - old) for new, old in zip(new_logprobs, logprobs, strict=True))
    return math.log(product ** (1 / len(logprobs)))


def kl_slope(logprob: float, ref_logprob: float, estimator: str, cap: float = 20.0) -> float:
    """The derivative of one token's KL estimate by logprob."""
    d = logprob - ref_logprob
    if estimator == "k1":
        return 1.0
    if estimator == "k2":
        return d
    if estimator == "absolute":
        return float((d > 0) - (d < 0))
    return 1 - math.exp(-d) if d >= -cap else 0.0


def aggregated(rows: Sequence[Row], aggregation: str, constant: float) -> float:
    """Token losses of all responses as one number, as the definition says."""
    if aggregation == "token_mean":
        return math.fsum(value for row in rows for value in row) / sum(len(row) for row in rows)
    if aggregation == "sequence_mean":
        return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
    return math.fsum(math.fsum(row) / constant for row in rows) / len(rows)


def value_loss(new_value: float, value: float, target: float, clip: float | None, factor: float = 0.5) -> float:
    """One state, by cases: the error of the moved value, or of the furthest allowed one where that is larger."""
    moved = new_value - value
    allowed = moved if clip is None else math.copysign(min(abs(moved), clip), moved)
    return factor * max(abs(new_value - target), abs(value + allowed - target)) ** 2


def log_softmax(logits: Row, temperature: float) -> list[float]:
    """The distribution that is sampled from: logits divided by the temperature, then normalised."""
    scaled = [logit / temperature for logit in logits]
    total = math.log(math.fsum(math.exp(value) for value in scaled))
    return [value - total for value in scaled]


def explained_variance(values: Row, returns: Row) -> float:
    """1 - var(returns - values) / var(returns)."""

    def variance(x: Row) -> float:
        mean = math.fsum(x) / len(x)
        return math.fsum((value - mean) ** 2 for value in x) / len(x)

    return 1 - variance([r - v for r, v in zip(returns, values, strict=True)]) / variance(returns)
