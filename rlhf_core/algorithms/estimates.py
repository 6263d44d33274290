"""The whole way from logprobs, values and scores to rewards, advantages, returns and their metrics, without files."""

from typing import Literal, NamedTuple

from rlhf_core.algorithms.advantages import gae
from rlhf_core.algorithms.kl import kl_estimate
from rlhf_core.algorithms.ragged import Offsets, PerRow, PerToken, RowFlags, lengths
from rlhf_core.algorithms.rewards import final_scores, token_rewards
from rlhf_core.algorithms.statistics import explained_variance, mean_and_std, sequence_mean, token_mean
from rlhf_core.algorithms.whitening import whiten


class Estimates(NamedTuple):
    """Per token, all [N] float64 in reward units (whitened advantages: none), and metrics by name."""

    rewards: PerToken
    advantages: PerToken
    returns: PerToken
    metrics: dict[str, float]


def estimate(
    logprobs: PerToken,
    ref_logprobs: PerToken,
    values: PerToken,
    scores: PerRow,
    finished: RowFlags,
    offsets: Offsets,
    *,
    kl_coef: float,
    kl_estimator: Literal["k1", "k2", "k3"],
    missing_eos_penalty: float,
    score_clip: float | None,
    gamma: float,
    gae_lambda: float,
    whiten_rewards: bool,
    whiten_advantages: bool,
) -> Estimates:
    """Return rewards, advantages and returns of all responses of an iteration.

    Order: KL and final score -> rewards -> whiten_rewards (scale only) -> GAE -> returns = A + V -> whiten_advantages.
    Returns and their metrics are those before advantages are whitened.

    Args:
        logprobs: [N], nats, of the response tokens under the policy that sampled them.
        ref_logprobs: [N], nats, under the reference.
        values: [N], reward units, V of the state before each token.
        scores: [B], reward units, one per response.
        finished: [B], True where the model ended the response by itself.
        offsets: [B + 1], int64. All rows of the iteration: whitening over a part of them gives other numbers.
        kl_coef, kl_estimator: See token_rewards and kl_estimate.
        missing_eos_penalty, score_clip: See final_scores.
        gamma, gae_lambda: See gae.
        whiten_rewards: Scale the rewards that GAE sees to unit variance, with their mean kept.
        whiten_advantages: Give the advantages mean 0 and unit variance.

    Returns:
        Estimates. Means over responses leave out those without tokens, which are counted by
        advantages/empty_responses.

    Raises:
        RowMismatch: If lengths disagree.
    """
    kl = kl_estimate(logprobs, ref_logprobs, estimator=kl_estimator)
    final = final_scores(scores, finished, missing_eos_penalty=missing_eos_penalty, score_clip=score_clip)
    rewards = token_rewards(kl, final, offsets, kl_coef=kl_coef)
    if whiten_rewards:
        rewards = whiten(rewards, shift_mean=False)
    advantages = gae(rewards, values, offsets, gamma=gamma, gae_lambda=gae_lambda)
    returns = advantages + values

    filled = lengths(offsets) > 0
    non_score = -kl_coef * sequence_mean(kl, offsets)
    final_mean = token_mean(final[filled])
    advantages_mean, advantages_std = mean_and_std(advantages)
    returns_mean, returns_std = mean_and_std(returns)
    metrics = {
        "objective/non_score_reward": non_score,
        "objective/scores_final": final_mean,
        "objective/rlhf_reward": non_score + final_mean,
        "advantages/mean": advantages_mean,
        "advantages/std": advantages_std,
        "advantages/tokens": kl.size,
        "advantages/empty_responses": int((~filled).sum()),
        "returns/mean": returns_mean,
        "returns/std": returns_std,
        "values/mean": token_mean(values),
        "val/explained_variance": explained_variance(values, returns),
    }
    if whiten_advantages:
        advantages = whiten(advantages, shift_mean=True)
    return Estimates(rewards, advantages, returns, metrics)
