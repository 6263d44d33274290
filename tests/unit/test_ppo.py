"""The PPO update on a tiny model: first ratio, independence of the split, optimiser state, schedule, bad input."""

import copy
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_core.errors import ModelError, NumericError
from rlhf_core.models.batching import collate
from rlhf_core.models.checkpoint import load_critic, load_optimizer, new_value_head, save_critic, save_optimizer
from rlhf_core.models.forward import token_outputs
from rlhf_core.models.loading import load_causal_lm, save_like
from rlhf_core.training.optimizer import adamw, captured, restore, schedule, trainable
from rlhf_core.training.ppo import Responses, Settings, minibatches, summary, update
from tests.tiny import tiny_model

CPU = torch.device("cpu")
PROMPTS = [[1, 70], [1, 71, 72, 73], [1, 74], [1, 75, 76]]
RESPONSES = [[80, 81, 2], [82], [83, 84, 85, 86, 4], [87, 88]]


def settings(**changes) -> Settings:
    values = {
        "temperature": 0.7, "ppo_epochs": 1, "minibatch_size": 4, "clip_range": 0.2, "value_clip_range": 0.3,
        "value_coef": 0.1, "entropy_coef": 0.01, "max_grad_norm": 1.0, "max_batch_tokens": 64, "logits_chunk_tokens": 8,
        "precision": "float32", "pad_id": 0, "seed": 1,
    }  # fmt: skip
    return Settings(**{**values, **changes})


def scored(model, head) -> Responses:
    """Responses with logprobs and values of this very model, and made-up advantages of mean 0."""
    batch = collate(PROMPTS, RESPONSES, range(4), pad_id=0, device=CPU)
    with torch.no_grad():
        found = token_outputs(
            model, batch, temperature=0.7, logits_chunk_tokens=8, precision="float32", value_head=head
        )
    lengths = np.cumsum([len(response) for response in RESPONSES])[:-1]
    advantages = np.random.default_rng(0).normal(size=11).astype(np.float32)
    advantages -= advantages.mean()
    values = found.values.numpy()
    flat = (found.logprobs.numpy(), values, advantages, values + advantages)
    return Responses(list("abcd"), PROMPTS, RESPONSES, *(np.split(array, lengths) for array in flat))


def run(model, head, responses, chosen, *, learning_rate=1e-3, state=None, first_step=0):
    named = [*trainable(model, "policy"), *trainable(head, "value_head")]
    optimizer = adamw([(named, learning_rate)], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    if state is not None:
        restore(optimizer, named, state)
    scheduler = schedule(optimizer, name="constant", warmup_steps=0, total_steps=1, first_step=first_step)
    log = update(model, head, responses, optimizer, scheduler, chosen, lambda metrics: None)
    return log, captured(optimizer, named, step=first_step + len(log), episode=4)


def weights(model, head) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in (*model.parameters(), *head.parameters())])


def test_before_the_first_step_ratios_are_one_despite_dropout_in_the_config():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model, head = GPT2LMHeadModel(config).eval(), new_value_head(32)
    log, _ = run(model, head, scored(model, head), settings())
    assert log[0]["policy/ratio_error_max"] <= 1e-4
    assert log[0]["policy/approxkl_avg"] <= 1e-6
    assert log[0]["policy/clipfrac_avg"] == 0.0
    assert log[0]["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert log[0]["loss/policy_avg"] == pytest.approx(0.0, abs=1e-6)  # -mean(A) of centred advantages


def test_the_step_does_not_depend_on_how_the_minibatch_is_split():
    results, losses = [], []
    for max_batch_tokens in (1, 12, 1000):  # one row each, two or three rows, all four
        model, head = tiny_model().eval(), new_value_head(64)
        responses = scored(model, head)
        log, state = run(model, head, responses, settings(max_batch_tokens=max_batch_tokens), learning_rate=1e-4)
        # AdamW's first step is sign-like, so compare what it saw: the first moment is 0.1 x gradient.
        results.append(torch.cat([moment.flatten() for moment in state.first_moments.values()]))
        losses.append((log[0]["loss/policy_avg"], log[0]["loss/value_avg"], log[0]["policy/entropy_avg"]))
    assert torch.allclose(results[0], results[2], atol=1e-6, rtol=0)
    assert torch.allclose(results[1], results[2], atol=1e-6, rtol=0)
    assert np.allclose(losses[0], losses[2], atol=1e-6) and np.allclose(losses[1], losses[2], atol=1e-6)


def test_the_loss_is_a_token_mean_over_the_minibatch():
    # Ratio 1 everywhere: the token-mean policy loss is -mean of all 11 advantages, not the mean of row means.
    model, head = tiny_model().eval(), new_value_head(64)
    responses = scored(model, head)
    for row, advantage in enumerate((1.0, 3.0, 5.0, 4.0)):
        responses.advantages[row][:] = advantage
    log, _ = run(model, head, responses, settings(max_batch_tokens=1))
    # 3 tokens of 1, 1 of 3, 5 of 5, 2 of 4 -> (3 + 3 + 25 + 8) / 11; the mean of row means would be 3.25.
    assert log[0]["loss/policy_avg"] == pytest.approx(-39 / 11, abs=1e-5)


def test_an_update_raises_good_tokens_and_lowers_bad_ones():
    model, head = tiny_model().eval(), new_value_head(64)
    responses = scored(model, head)
    before = torch.from_numpy(np.concatenate(responses.logprobs))
    run(model, head, responses, settings(ppo_epochs=3, entropy_coef=0.0), learning_rate=3e-4)
    moved = torch.from_numpy(np.concatenate(scored(model, head).logprobs)) - before
    assert float((moved * torch.from_numpy(np.concatenate(responses.advantages))).sum()) > 0


def test_two_updates_with_carried_state_equal_one_of_two_epochs(tmp_path):
    model, head = tiny_model().eval(), new_value_head(64)
    responses = scored(model, head)
    whole_model, whole_head = copy.deepcopy(model), copy.deepcopy(head)
    run(whole_model, whole_head, responses, settings(ppo_epochs=2))
    _, state = run(model, head, responses, settings())
    save_optimizer(state, tmp_path)
    run(model, head, responses, settings(), state=load_optimizer(tmp_path), first_step=1)
    assert torch.equal(weights(model, head), weights(whole_model, whole_head))


def test_optimizer_state_of_another_model_is_refused():
    model, head = tiny_model().eval(), new_value_head(64)
    _, state = run(model, head, scored(model, head), settings())
    other = nn.Linear(3, 1)
    named = trainable(other, "policy")
    with pytest.raises(ModelError, match="other parameters"):
        restore(adamw([(named, 1e-3)], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0), named, state)


@pytest.mark.parametrize(
    ("name", "first_step", "expected"),
    [
        ("constant", 7, [1.0, 1.0]),
        ("linear", 0, [0.0, 0.5]),  # two warm-up steps: 0/2, 1/2
        ("linear", 6, [0.5, 0.375]),  # then (10 - step) / (10 - 2)
        ("cosine", 6, [0.5, 0.3086583]),  # 0.5 (1 + cos(pi (step - 2) / 8))
    ],
)
def test_schedules_continue_where_the_last_iteration_stopped(name, first_step, expected):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = adamw([([("p", parameter)], 1.0)], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    scheduler = schedule(optimizer, name=name, warmup_steps=2, total_steps=10, first_step=first_step)
    found = [optimizer.param_groups[0]["lr"]]
    optimizer.step()
    scheduler.step()
    found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(expected, abs=1e-6)


def test_every_epoch_visits_every_row_once_in_its_own_order():
    batches = list(minibatches(10, ppo_epochs=2, minibatch_size=4, seed=3))
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = [*chain(*batches[:3])], [*chain(*batches[3:])]
    assert batches[0] != batches[3]
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert batches == list(minibatches(10, ppo_epochs=2, minibatch_size=4, seed=3))


def test_a_non_finite_loss_names_step_and_rows_and_leaves_the_weights():
    model, head = tiny_model().eval(), new_value_head(64)
    responses = scored(model, head)
    responses.advantages[2][1] = np.nan
    before = weights(model, head).clone()
    with pytest.raises(NumericError, match=r"optimiser step 1, rows .*loss is nan"):
        run(model, head, responses, settings())
    assert torch.equal(weights(model, head), before)


def test_summary_averages_steps():
    log = [
        {"val/ratio": 1.0, "lr": 0.1, "grad_norm": 2.0, "policy/ratio_error_max": 0.0, "val/squared_error": 1.0},
        {"val/ratio": 1.5, "lr": 0.2, "grad_norm": 4.0, "policy/ratio_error_max": 0.5, "val/squared_error": 3.0},
    ]
    assert summary(log) == {
        "val/ratio": 1.25, "lr": 0.2, "grad_norm_avg": 3.0, "policy/max_first_ratio_error": 0.0, "optimizer_steps": 2,
    }  # fmt: skip


def test_policy_and_critic_are_the_same_after_a_reload(tiny_dir, tmp_path):
    model, head = load_causal_lm(tiny_dir, device=CPU, precision="float32"), nn.Linear(64, 1)
    before = scored(model, head)
    save_like(model, tiny_dir, tmp_path / "policy", card="x")
    save_critic(head, tmp_path / "critic")
    again = load_causal_lm(tmp_path / "policy", device=CPU, precision="float32")
    after = scored(again, load_critic(tmp_path / "critic", hidden_size=64, device=CPU))
    for name in ("logprobs", "values"):
        assert np.array_equal(np.concatenate(getattr(before, name)), np.concatenate(getattr(after, name)))


def test_a_value_head_for_another_hidden_size_is_refused(tmp_path):
    save_critic(nn.Linear(32, 1), tmp_path)
    with pytest.raises(ModelError, match=r"hidden size 32, but the policy has 64"):
        load_critic(tmp_path, hidden_size=64, device=CPU)
