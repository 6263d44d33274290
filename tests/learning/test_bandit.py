"""Does it learn? A one-token language task whose optimum is known, solved by the shipped maths from samples to steps.

For two prompts a response is one token, worth 1 when its id is divisible by 5 and 0 otherwise. Maximising
E[score] - kl_coef * KL(policy || reference) over all distributions has the solution

    pi*(a) = pi_ref(a) exp(score(a) / kl_coef) / Z

(Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2), so the probability of a good
token and the KL at the optimum follow from the untrained model alone. Samples are drawn from the model's own softmax
here; everything after them is what the stages run.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.responses import Responses as Rollouts
from rlhf_core.config import AdvantageParams
from rlhf_core.models.checkpoint import OptimizerState, new_value_head
from rlhf_core.models.critic import Critic
from rlhf_core.training.distributed import ALONE
from rlhf_core.training.learner import Learner, new_learner
from rlhf_core.training.ppo import update
from rlhf_core.training.ppo_loss import Settings
from rlhf_core.training.responses import Responses
from tests.iteration import computed
from tests.tiny import tiny_model

PROMPTS = [[1, 70], [1, 71, 72]]
GOOD = torch.arange(266) % 5 == 0
SAMPLES, ITERATIONS, EPOCHS, MINIBATCH = 192, 30, 2, 64
STEPS = ITERATIONS * EPOCHS * len(PROMPTS) * SAMPLES // MINIBATCH
# Whether advantages are whitened: GRPO divides by the deviation of each group by itself.
ESTIMATORS = {"gae": True, "rloo": True, "grpo": False}


def log_distribution(learner: Learner, prompt: list[int]) -> Tensor:
    """[V] float64, nats, of the response's only token."""
    with torch.no_grad():
        logits: Tensor = learner.policy(torch.tensor([prompt])).logits[0, -1]
    return torch.log_softmax(logits.double(), -1)


def value(learner: Learner, prompt: list[int]) -> float:
    """V of the state before the response."""
    if learner.critic is None:
        return 0.0
    with torch.no_grad():
        hidden = learner.policy.base_model(torch.tensor([prompt])).last_hidden_state[0, -1:]
        return float(learner.critic.values(hidden))


def settings(seed: int) -> Settings:
    return Settings(
        temperature=1.0, ppo_epochs=EPOCHS, minibatch_size=MINIBATCH, old_logprobs="trainer", ratio="token",
        clip_range=0.2, clip_range_high=0.2, dual_clip=None, value_clip_range=None, value_loss_factor=0.5,
        value_coef=0.1, entropy_coef=0.0, kl_loss_coef=0.0, kl_loss_estimator="k3", kl_estimate_bound=None,
        aggregation="token_mean", aggregation_constant=1.0, target_kl=None, max_kl=None, max_grad_norm=1.0,
        max_skipped_steps=0, iteration="1", max_batch_tokens=4096, logits_chunk_tokens=512,
        precision="float32", pad_id=0, seed=seed,
    )  # fmt: skip


def iterate(learner: Learner, references: list[Tensor], params: AdvantageParams, seed: int) -> None:
    """Sample, score, estimate and update once."""
    generator = torch.Generator().manual_seed(seed)
    now = [log_distribution(learner, prompt) for prompt in PROMPTS]
    drawn = torch.cat([torch.multinomial(p.exp(), SAMPLES, replacement=True, generator=generator) for p in now])
    prompt_of = np.repeat(np.arange(len(PROMPTS)), SAMPLES)
    logprobs, ref_logprobs = (
        np.array([float(by_prompt[p][token]) for p, token in zip(prompt_of, drawn, strict=True)])
        for by_prompt in (now, references)
    )
    rows = len(drawn)
    values = np.array([value(learner, prompt) for prompt in PROMPTS])[prompt_of]
    rollouts = Rollouts(
        first_row=0,
        offsets=np.arange(rows + 1),
        own=np.ones(rows, bool),
        groups=prompt_of,
        finished=np.ones(rows, bool),
        scores=GOOD[drawn].double().numpy(),
        sampler_logprobs=logprobs,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        full_kl=None,
        values=None if learner.critic is None else values,
        bootstrap_values=None if learner.critic is None else np.zeros(rows),
    )
    found, weights, *_ = computed(rollouts, params, conventions="ours", max_new_tokens=1)
    split = lambda x: None if x is None else list(x.astype(np.float32)[:, None])
    critic: dict[str, Any] = {}
    if learner.critic is not None:
        critic = {"bootstrap_value": [0.0] * rows, "bootstrap_return": [None] * rows}
        critic |= {"values": split(values), "returns": split(found.returns)}
    responses = Responses(
        sample_ids=[str(row) for row in range(rows)],
        prompt_ids=[PROMPTS[p] for p in prompt_of],
        response_ids=[[int(token)] for token in drawn],
        logprobs=split(logprobs),
        ref_logprobs=split(ref_logprobs),
        importance_weights=split(weights),
        advantages=split(found.advantages),
        **critic,
    )
    update(learner, responses, settings(seed), ALONE, lambda metrics: None, None)


def solve(estimator: str, kl_coef: float) -> tuple[float, float, float, float]:
    """Train, and return over both prompts the mean P(good) and KL: (reached, optimal, KL reached, KL optimal)."""
    critic = Critic(new_value_head(64)) if estimator == "gae" else None
    learner = new_learner(
        tiny_model().eval(), critic, OptimizerState(steps={}, episode=0, first_moments={}, second_moments={}),
        critic_only=False, learning_rate=1e-3, value_head_learning_rate=1e-2, critic_learning_rate=1e-3,
        optimizer="adamw", adam_betas=(0.9, 0.99), adam_eps=1e-8, weight_decay=0.0, lr_schedule="linear",
        warmup_steps=0, schedule_steps=STEPS + 1,
    )  # fmt: skip
    params = AdvantageParams(
        estimator=estimator, kl_coef=kl_coef, whiten_advantages=ESTIMATORS[estimator], gamma=1.0, gae_lambda=0.95,
        value_gae_lambda=None, kl_estimator="k1", kl_controller="fixed", kl_target=1.0, kl_horizon=1,
        score_scaling="none", score_clip=None, missing_eos_penalty=0.0, missing_eos_mode="subtract",
        overlong_buffer=0, overlong_penalty=0.0, whiten_rewards=False, whitening_variance=None, correction="none",
        correction_min=0.5, correction_max=2.0,
    )  # fmt: skip
    references = [log_distribution(learner, prompt) for prompt in PROMPTS]
    for seed in range(ITERATIONS):
        iterate(learner, references, params, seed)
    results = []
    for prompt, reference in zip(PROMPTS, references, strict=True):
        optimum = torch.log_softmax(reference + GOOD.double() / kl_coef, -1)
        for p in (log_distribution(learner, prompt), optimum):
            results.append((float(p.exp()[GOOD].sum()), float((p.exp() * (p - reference)).sum())))
    reached, optimal = np.mean(results[::2], axis=0), np.mean(results[1::2], axis=0)
    return float(reached[0]), float(optimal[0]), float(reached[1]), float(optimal[1])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_regularised_optimum_is_reached_and_a_larger_kl_coef_keeps_closer_to_the_reference(estimator: str) -> None:
    good, best, kl, best_kl = solve(estimator, kl_coef=1.0)
    assert good == pytest.approx(best, abs=0.03)
    assert kl == pytest.approx(best_kl, rel=0.15)
    freer, freer_best, freer_kl, freer_best_kl = solve(estimator, kl_coef=0.3)
    assert freer == pytest.approx(freer_best, abs=0.04)
    assert freer_kl == pytest.approx(freer_best_kl, rel=0.15)
    assert freer_kl > 2 * kl
