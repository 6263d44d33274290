"""Losses of the policy, the critic and the reward model, per token, pair or list.

Left out: their weights in a minibatch (aggregation.py) and in the whole loss (rlhf_core/training). Tokens are flat, row
after row, so there is no padding and no mask: what does not count is not passed in.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from rlhf_core.errors import RowMismatch

Tokens = Float[Tensor, "tokens"]
Pairs = Float[Tensor, "pairs"]
Rows = Float[Tensor, "rows"]
Lists = Float[Tensor, "lists"]

# Nats. exp(20) = 4.9e8 is finite in float32, and so is its product with any advantage of sane size.
LOG_RATIO_CAP = 20.0


def policy_loss(
    log_ratios: Tokens,
    advantages: Tokens,
    importance_weights: Tokens,
    *,
    clip_range: float,
    clip_range_high: float,
    dual_clip: float | None,
) -> Tokens:
    """Return the clipped policy loss of each token.

        ratio = exp(log_ratios)
        loss  = importance_weights * max(-A * ratio, -A * clip(ratio, 1 - clip_range, 1 + clip_range_high))

    and with dual_clip, where A < 0, at most importance_weights * (-A * dual_clip): without it, a bad token that the
    policy makes far more likely has a loss without bound.

    The log-ratio is bounded to +-20 before exp. A token beyond that has a finite loss and no gradient: its ratio means
    nothing any more, and its gradient would drown all others.

    Args:
        log_ratios: [N], nats, new_logprobs - logprobs, or what sequence_log_ratios gives; carries the gradient.
        advantages: [N].
        importance_weights: [N], 1 = on policy; a factor without gradient.
        clip_range: In (0, 1).
        clip_range_high: Positive; clip_range for the symmetric range of the paper.
        dual_clip: Above 1; None = off.

    Returns:
        [N].

    Raises:
        RowMismatch: If the shapes differ.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7, negated. clip_range_high: Yu et al.
    2025, "DAPO: an open-source LLM reinforcement learning system at scale". dual_clip: Ye et al. 2020, "Mastering
    complex control in MOBA games with deep reinforcement learning". importance_weights: Hilton et al. 2021, "Batch
    size-invariance for policy optimization" (the decoupled objective). The bound is ours.
    """
    _check_one_shape(log_ratios, advantages, importance_weights)
    ratio = torch.exp(torch.clamp(log_ratios, -LOG_RATIO_CAP, LOG_RATIO_CAP))
    clipped = torch.clamp(ratio, 1 - clip_range, 1 + clip_range_high)
    losses = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * dual_clip), losses)
    return importance_weights * losses


def sequence_log_ratios(new_logprobs: Tokens, logprobs: Tokens, lengths: Sequence[int]) -> Tokens:
    """Return the log-ratio of each token's whole response, per token, with a gradient of its own for each token.

        value:    mean_u (new_logprobs_u - logprobs_u), over the tokens u of the response: the same for all of them
        gradient: that of new_logprobs_t alone

    so that every token is clipped with its response, and a token's advantage weighs only that token's gradient.

    Args:
        new_logprobs: [N], nats, under the policy that is being updated, row after row; carries the gradient.
        logprobs: [N], nats, under the policy before the update.
        lengths: Tokens of each row, 1 or more; they sum to N.

    Returns:
        [N], nats.

    Raises:
        RowMismatch: If the shapes differ or lengths do not fit them.

    Source: Zheng et al. 2025, "Group sequence policy optimization", section 4.3 (GSPO-token).
    """
    _check_one_shape(new_logprobs, logprobs)
    if sum(lengths) != len(new_logprobs):
        raise RowMismatch(f"lengths sum to {sum(lengths)}, expected {len(new_logprobs)}, the number of tokens")
    fixed = new_logprobs.detach()
    rows = (fixed - logprobs).split(list(lengths))
    means = torch.cat([row.mean().expand(len(row)) for row in rows]) if rows else fixed
    return means + (new_logprobs - fixed)


def kl_loss(
    new_logprobs: Tokens,
    ref_logprobs: Tokens,
    *,
    estimator: Literal["k1", "k2", "k3", "absolute"],
    estimate_bound: float | None,
) -> Tokens:
    """Return one differentiable estimate of KL(new policy || reference) per sampled token.

    With d = new_logprobs - ref_logprobs:

        k1       = d                    its gradient is 0 on average: it pulls nowhere, and is here to compare
        k2       = d^2 / 2              gradient d: on average that of the KL itself, on tokens the policy sampled
        k3       = exp(-d) - 1 + d      gradient 1 - exp(-d)
        absolute = |d|

    In k3, d is bounded below by -20, so that value and gradient stay finite. Beyond a bound the gradient is 0.

    Args:
        new_logprobs: [N], nats, under the policy that is being updated; carries the gradient.
        ref_logprobs: [N], nats, of the same tokens under the reference, at the same temperature.
        estimator: k1, k2, k3 or absolute.
        estimate_bound: Nats, of the estimate's absolute value; None = none.

    Returns:
        [N], nats.

    Raises:
        RowMismatch: If the shapes differ.

    Source: Schulman 2020, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html); k3 in the loss: Shao
    et al. 2024, "DeepSeekMath". The bound of d is ours.
    """
    _check_one_shape(new_logprobs, ref_logprobs)
    d = new_logprobs - ref_logprobs
    if estimator == "k1":
        estimate = d
    elif estimator == "k2":
        estimate = torch.square(d) / 2
    elif estimator == "k3":
        bounded = torch.clamp(d, min=-LOG_RATIO_CAP)
        estimate = torch.expm1(-bounded) + bounded
    else:
        estimate = torch.abs(d)
    return estimate if estimate_bound is None else torch.clamp(estimate, -estimate_bound, estimate_bound)


def value_loss(
    new_values: Tokens, values: Tokens, returns: Tokens, *, value_clip_range: float | None, factor: float
) -> Tokens:
    """Return the value loss of each state.

        clipped = clip(new_values, values - value_clip_range, values + value_clip_range)
        loss    = factor * max((new_values - returns)^2, (clipped - returns)^2)

    and without a value_clip_range, factor * (new_values - returns)^2.

    Args:
        new_values: [N], float32, reward units, of the critic that is being updated; carries the gradient.
        values: [N], reward units, before the update.
        returns: [N], reward units.
        value_clip_range: Reward units, positive; None = unclipped.
        factor: Positive, usually 0.5.

    Returns:
        [N], squared reward units.

    Raises:
        RowMismatch: If the shapes differ.

    Source: openai/baselines, ppo2 (not in the paper); the 0.5 is theirs.
    """
    _check_one_shape(new_values, values, returns)
    errors = torch.square(new_values - returns)
    if value_clip_range is None:
        return factor * errors
    clipped = torch.clamp(new_values, values - value_clip_range, values + value_clip_range)
    return factor * torch.maximum(errors, torch.square(clipped - returns))


def pairwise_loss(
    chosen: Pairs, rejected: Pairs, *, margins: Pairs | None = None, targets: Pairs | None = None
) -> Pairs:
    """Return the Bradley-Terry loss of each preference pair.

        z    = chosen - rejected - margin
        loss = -target * log sigmoid(z) - (1 - target) * log sigmoid(-z)

    Args:
        chosen: [B], reward units, scores of the preferred responses.
        rejected: [B], reward units, scores of the others.
        margins: [B], reward units, by how much a preferred response is to be ahead; None = 0.
        targets: [B], probability that `chosen` is the better one: 1 = sure, 1 - label smoothing, 0.5 = a tie; None = 1.

    Returns:
        [B], nats; ln 2 for z = 0, and growing like |z|, not overflowing, for pairs that are badly wrong.

    Raises:
        RowMismatch: If the lengths differ.

    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback", eq. 1. Margin:
    Touvron et al. 2023, "Llama 2: open foundation and fine-tuned chat models", eq. 2. Targets: Mitchell 2023, "A note
    on DPO with noisy preferences and relationship to IPO" (conservative loss).
    """
    margins = torch.zeros_like(chosen) if margins is None else margins
    targets = torch.ones_like(chosen) if targets is None else targets
    _check_one_shape(chosen, rejected, margins, targets)
    z = chosen - rejected - margins
    return -targets * functional.logsigmoid(z) - (1 - targets) * functional.logsigmoid(-z)


def listwise_loss(scores: Rows, ranks: Sequence[Sequence[int]]) -> Lists:
    """Return the Plackett-Luce loss of each ranked list: how unlikely its order is when the best is drawn repeatedly.

        loss = sum_i (log sum_{j = i or rank_j > rank_i} exp(s_j) - s_i)

    Responses of equal rank are not compared: each is set against itself and all that are worse than it. A list of two
    is the Bradley-Terry loss, one of equals is 0.

    Args:
        scores: [N], reward units, list after list.
        ranks: One list of ranks for each list, 0 = best; they are N in all.

    Returns:
        [lists], nats, a sum over the places of a list: a longer one says more, and weighs more.

    Raises:
        RowMismatch: If the numbers of scores and ranks differ.

    Source: Plackett 1975, "The analysis of permutations"; for responses, Rafailov et al. 2023, "Direct preference
    optimization", appendix A.3. The rule for ties is ours.
    """
    lengths = [len(one) for one in ranks]
    if sum(lengths) != len(scores):
        raise RowMismatch(f"ranks are {sum(lengths)} in all, expected {len(scores)}, the number of scores")
    losses = [scores.new_zeros(0)]
    for own, rank in zip(scores.split(lengths), ranks, strict=True):
        places = torch.tensor(rank, device=scores.device)
        compared = (places[None, :] > places[:, None]) | torch.eye(len(rank), dtype=torch.bool, device=scores.device)
        rest = torch.where(compared, own[None, :], -torch.inf).logsumexp(dim=1)
        losses.append((rest - own).sum()[None])
    return torch.cat(losses)


def centring_loss(scores: Rows, lengths: Sequence[int]) -> Lists:
    """Return how far the scores of each list are from being centred at 0.

        loss = (2 * mean of the list's scores)^2        for a pair: (chosen + rejected)^2

    Only differences of scores enter the other losses, so their origin drifts; this holds it.

    Args:
        scores: [N], reward units, list after list.
        lengths: Scores of each list, 1 or more; they sum to N.

    Returns:
        [lists], squared reward units.

    Raises:
        RowMismatch: If lengths do not fit.

    Source: Eisenstein et al. 2023, "Helping or herding? Reward model ensembles mitigate but do not eliminate reward
    hacking", on centring; lists of more than two are ours.
    """
    if sum(lengths) != len(scores):
        raise RowMismatch(f"lengths sum to {sum(lengths)}, expected {len(scores)}, the number of scores")
    means = [own.mean()[None] for own in scores.split(list(lengths))]
    return torch.square(2 * torch.cat([scores.new_zeros(0), *means]))


def _check_one_shape(*tensors: Tensor) -> None:
    """Refuse shapes that would broadcast."""
    if any(tensor.shape != tensors[0].shape for tensor in tensors):
        found = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise RowMismatch(f"expected tensors of one shape, found {found}")
