"""TRL's own PPOTrainer and this project, under `conventions: trl`, compute the same numbers from one batch.

The whole way is compared: logprobs, values and scores of the models; rewards, advantages and returns; losses and
gradient norms of three steps of plain gradient descent, and the weights after them. What the two do differently by
intention is in docs/algorithms.md. Run by `make parity`.

Mutations that must fail here: the score left on the last token; the slot after it without a value loss; the population
variance; TRL's 0.5 dropped; value and policy losses divided by one count.
"""

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForSequenceClassification, PreTrainedModel

pytest.importorskip("trl", reason="TRL is installed by `make parity`, in a venv of its own")

from rlhf_core.algorithms.conventions import CONVENTIONS
from rlhf_core.algorithms.estimates import Estimates
from rlhf_core.algorithms.responses import Responses
from rlhf_core.config import load_run
from rlhf_core.models.batching import collate
from rlhf_core.models.critic import Critic
from rlhf_core.models.forward import sequence_scores, token_outputs
from rlhf_core.training.distributed import ALONE
from rlhf_core.training.learner import Learner
from rlhf_core.training.ppo import update
from rlhf_core.training.responses import Responses as TrainingResponses
from tests.iteration import computed
from tests.meta.project import ROOT
from tests.parity import trl_run
from tests.ppo_case import CPU, learner_of, settings
from tests.tiny import tiny_model

EOS, WIDTH, TEMPERATURE, STEPS, LEARNING_RATE = 2, 12, 0.7, 3, 0.01
# Response lengths, and whether the response ends itself: three fill the whole width (one of them unfinished), one is an
# EOS alone, one ends a token before the width.
ROWS = [(12, True), (12, False), (1, True), (5, True), (9, True), (11, True), (12, True), (3, True)]
LENGTHS = [length for length, _ in ROWS]
OPTIONS = [{"kl_estimator": "k1", "whiten_rewards": False}, {"kl_estimator": "k3", "whiten_rewards": True}]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Scored(NamedTuple):
    """Our forward passes over the batch."""

    logprobs: np.ndarray
    ref_logprobs: np.ndarray
    values: np.ndarray
    bootstrap_values: np.ndarray
    scores: np.ndarray


def classifier(seed: int) -> PreTrainedModel:
    """A tiny model with a head for one number, of the order of 1."""
    config = copy.deepcopy(tiny_model(seed).config)
    config.num_labels = 1
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(config).float().eval()


def disturbed(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A copy with other weights: its ratios to the model leave the clip range now and then."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.005 * torch.randn(parameter.shape, generator=generator))
    return other


def models() -> trl_run.Models:
    policy = tiny_model(0).eval()
    return trl_run.Models(policy, disturbed(policy, 1), disturbed(policy, 2), classifier(3), classifier(4))


def rows() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of 4 to 7 tokens, and responses; pad, BOS and EOS occur in no other place than theirs."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda count: torch.randint(5, 266, (count,), generator=generator).tolist()
    prompts = [[1, 10 + row, *draw(2 + row % 4)] for row in range(len(ROWS))]
    return prompts, [[*draw(length - 1), EOS] if ended else draw(length) for length, ended in ROWS]


@pytest.fixture(scope="module", params=OPTIONS, ids=["k1", "k3, rewards whitened"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def trained(options: dict[str, Any]) -> trl_run.Models:
    """What TRL trains in place, anew for each of the options."""
    return models()


@pytest.fixture(scope="module")
def trl(options: dict[str, Any], trained: trl_run.Models, tmp_path_factory: pytest.TempPathFactory) -> trl_run.Captured:
    return trl_run.run(
        trained,
        *rows(),
        tmp_path_factory.mktemp("trl"),
        width=WIDTH,
        temperature=TEMPERATURE,
        learning_rate=LEARNING_RATE,
        num_ppo_epochs=STEPS,
        kl_coef=0.05,
        missing_eos_penalty=1.0,
        gamma=0.99,
        lam=0.95,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=0.1,
        local_rollout_forward_batch_size=3,
        **options,
    )


def separate(value_model: PreTrainedModel) -> Critic:
    """TRL's value model as a critic of ours."""
    return Critic(value_model.score, value_model.model)


@pytest.fixture(scope="module")
def scored() -> Scored:
    fresh, (prompts, responses) = models(), rows()
    batch = collate(prompts, responses, range(len(prompts)), pad_id=0, device=CPU)
    passes = {"temperature": TEMPERATURE, "logits_chunk_tokens": 16, "precision": "float32"}
    with torch.no_grad():
        sampled = token_outputs(fresh.sampler, batch, **passes, critic=separate(fresh.value_model))
        reference = token_outputs(fresh.reference, batch, **passes, critic=None)
        scores = sequence_scores(fresh.reward_model, batch, precision="float32")
    columns = (sampled.logprobs, reference.logprobs, sampled.values, sampled.bootstrap_values, scores)
    return Scored(*(column.numpy() for column in columns))


@pytest.fixture(scope="module")
def estimates(scored: Scored, options: dict[str, Any]) -> Estimates:
    responses = Responses(
        first_row=0,
        offsets=np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64),
        own=np.ones(len(ROWS), dtype=bool),
        groups=np.arange(len(ROWS)),
        finished=np.array([ended for _, ended in ROWS]),
        scores=scored.scores,
        sampler_logprobs=scored.logprobs,
        logprobs=scored.logprobs,
        ref_logprobs=scored.ref_logprobs,
        full_kl=None,
        values=scored.values,
        bootstrap_values=scored.bootstrap_values,
    )
    params = load_run(ROOT).params.advantages.model_copy(
        update={"kl_coef": 0.05, "missing_eos_penalty": 1.0, "gamma": 0.99, "gae_lambda": 0.95, **options}
    )
    return computed(responses, params, conventions="trl", max_new_tokens=WIDTH).estimates


def assert_close(ours: Any, theirs: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(ours).to(theirs.dtype), theirs, **CLOSE)


def test_the_forward_passes_agree(trl: trl_run.Captured, scored: Scored) -> None:
    tokens = trl.before["token_mask"]
    assert tokens.sum(1).tolist() == LENGTHS
    for name in ("logprobs", "ref_logprobs", "values"):
        assert_close(getattr(scored, name), trl.before[name][tokens])
    slots = trl.before["value_mask"] & ~tokens
    assert_close(scored.bootstrap_values[np.array(LENGTHS) < WIDTH], trl.before["values"][slots])
    penalties = torch.tensor([0.0 if ended else 1.0 for _, ended in ROWS])
    assert_close(scored.scores, trl.before["scores"] + penalties)


def test_rewards_advantages_and_returns_agree(trl: trl_run.Captured, estimates: Estimates) -> None:
    tokens = trl.before["token_mask"]
    slots = trl.before["value_mask"] & ~tokens
    assert_close(estimates.rewards, trl.before["rewards"][tokens])
    assert_close(estimates.advantages, trl.before["whitened"][tokens])
    assert_close(estimates.returns, trl.before["returns"][tokens])
    assert estimates.bootstrap_returns is not None
    after = estimates.bootstrap_returns[~np.isnan(estimates.bootstrap_returns)]
    assert_close(after, trl.before["returns"][slots])


def test_losses_gradients_and_weights_agree(
    trl: trl_run.Captured, trained: trl_run.Models, scored: Scored, estimates: Estimates
) -> None:
    ours, (prompts, responses) = models(), rows()
    cut = lambda flat: np.split(np.asarray(flat, dtype=np.float32), np.cumsum(LENGTHS)[:-1])
    after = [None if np.isnan(value) else float(value) for value in estimates.bootstrap_returns]
    batch = TrainingResponses(
        sample_ids=[f"1-p{row}-0" for row in range(len(ROWS))],
        prompt_ids=prompts,
        response_ids=responses,
        logprobs=cut(scored.logprobs),
        ref_logprobs=cut(scored.ref_logprobs),
        importance_weights=cut(np.ones_like(scored.logprobs)),
        advantages=cut(estimates.advantages),
        values=cut(scored.values),
        returns=cut(estimates.returns),
        bootstrap_value=scored.bootstrap_values.tolist(),
        bootstrap_return=after,
    )
    chosen = settings(
        temperature=TEMPERATURE, ppo_epochs=STEPS, minibatch_size=len(ROWS), old_logprobs="sampler", clip_range=0.2,
        clip_range_high=0.2, value_clip_range=0.2, value_coef=0.1, entropy_coef=0.0, max_grad_norm=1e9,
        value_loss_factor=CONVENTIONS["trl"].value_loss_factor,
    )  # fmt: skip
    learner = gradient_descent(learner_of(ours.policy, separate(ours.value_model)))
    log = update(learner, batch, chosen, ALONE, lambda metrics: None, None).log
    assert len(log) == len(trl.steps) == STEPS
    for step, theirs in zip(log, trl.steps, strict=True):
        found = {
            "pg_loss": step["loss/policy_avg"],
            "vf_loss": step["loss/value_avg"],
            "loss": step["loss/policy_avg"] + 0.1 * step["loss/value_avg"],
            "vf_clipfrac": step["val/clipfrac_avg"],
            "grad_norm": float(np.hypot(step["grad_norm"], step["critic_grad_norm"])),
        }
        assert found == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert log[0]["policy/clipfrac_avg"] > 0.1 and log[-1]["val/clipfrac_avg"] > 0.1  # both clips are at work
    for mine, theirs in ((ours.policy, trained.policy), (ours.value_model, trained.value_model)):
        for (name, weight), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            assert float((weight - other).detach().abs().max()) < 1e-5, name


def gradient_descent(learner: Learner) -> Learner:
    """The same learner with plain gradient descent, whose steps are as exact as the gradient."""
    parameters = [weight for named in learner.parts.values() for _, weight in named]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return Learner(learner.policy, learner.critic, learner.parts, optimizer, scheduler)
