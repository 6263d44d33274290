"""The PPO update on a tiny model: first ratio, independence of the split, each loss's effect, early stop, bad input.

Mutations that must fail here: parts divided by their own counts; slots in the policy loss; sign of the KL loss;
importance weights ignored; the step that exceeds target_kl taken.
"""

import copy
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PhiConfig, PhiForCausalLM

from rlhf_core.errors import NumericError, RowMismatch
from rlhf_core.models.checkpoint import load_critic, load_optimizer, save_critic, save_optimizer
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import check_head, load_causal_lm, save_like
from rlhf_core.models.memory import TokenBudget
from rlhf_core.training import ppo
from rlhf_core.training.distributed import ALONE
from rlhf_core.training.minibatches import minibatches
from rlhf_core.training.ppo import Progress, update
from rlhf_core.training.ppo_measures import explained_variance_after, kl_after, summary
from tests.ppo_case import (
    CPU,
    NO_STATE,
    gradient,
    learner_of,
    run,
    scored,
    separate_critic,
    settings,
    shared_critic,
    weights,
)
from tests.reference import oracles
from tests.tiny import tiny_model

CRITICS = {"shared": shared_critic, "separate": separate_critic, "none": lambda: None}


def test_before_the_first_step_ratios_are_one_despite_dropout_in_the_config():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model, critic = GPT2LMHeadModel(config).eval(), Critic(torch.nn.Linear(32, 1))
    log, _ = run(model, critic, scored(model, critic), settings())
    assert log[0]["policy/ratio_error_max"] <= 1e-4
    assert log[0]["policy/approxkl_avg"] <= 1e-6
    assert log[0]["policy/clipfrac_avg"] == 0.0
    assert log[0]["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert log[0]["loss/policy_avg"] == pytest.approx(0.0, abs=1e-6)  # -mean(A) of centred advantages


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_the_step_does_not_depend_on_how_the_minibatch_is_split(aggregation, ratio):
    gradients, logs = [], []
    for max_batch_tokens in (1, 12, 1000):  # one row each, two or three rows, all four
        model, critic = tiny_model().eval(), shared_critic()
        responses = scored(model, critic)
        for row in (0, 2):
            responses.logprobs[row][:] += 0.3  # so that some ratios are clipped, and none is 1
            responses.ref_logprobs[row][:] -= 0.2
        responses.bootstrap_return[1:3] = [0.5, -0.5]
        chosen = settings(max_batch_tokens=max_batch_tokens, aggregation=aggregation, ratio=ratio, kl_loss_coef=0.1)
        log, state = run(model, critic, responses, chosen)
        gradients.append(gradient(state))
        logs.append(log[0])
    for part, whole in ((gradients[0], gradients[2]), (gradients[1], gradients[2])):  # of norm 1, as clipped
        assert torch.allclose(part, whole, atol=1e-6, rtol=0)
    assert logs[0] == pytest.approx(logs[2], rel=1e-5, abs=1e-6)
    assert logs[1] == pytest.approx(logs[2], rel=1e-5, abs=1e-6)


def test_weights_rounded_for_bfloat16_products_are_those_of_this_step_in_every_micro_batch():
    logs = []
    for max_batch_tokens in (1, 1000):
        model, critic = tiny_model().eval(), shared_critic()
        chosen = settings(max_batch_tokens=max_batch_tokens, precision="bf16-autocast", ppo_epochs=3)
        logs.append(run(model, critic, scored(model, critic), chosen, learning_rate=1e-4)[0])
    for split, whole in zip(*logs, strict=True):
        # 8 bits; the second and third step with weights of the first would have a ratio of 1 throughout.
        assert split["val/ratio"] == pytest.approx(whole["val/ratio"], rel=2e-2)
        assert split["loss/policy_avg"] == pytest.approx(whole["loss/policy_avg"], rel=2e-2, abs=2e-2)
    assert logs[0][2]["policy/approxkl_avg"] > 10 * logs[0][0]["policy/approxkl_avg"]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_the_loss_is_aggregated_over_the_minibatch(aggregation):
    # Ratio 1 everywhere: each token's loss is minus its advantage. token_mean: 3 tokens of 1, 1 of 3, 5 of 5, 2 of 4:
    # -(3 + 3 + 25 + 8) / 11; sequence_mean: -(1 + 3 + 5 + 4) / 4; constant 8: -(39 / 8) / 4.
    model = tiny_model().eval()
    responses = scored(model, None)
    for row, advantage in enumerate((1.0, 3.0, 5.0, 4.0)):
        responses.advantages[row][:] = advantage
    log, _ = run(model, None, responses, settings(max_batch_tokens=1, aggregation=aggregation))
    expected = {"token_mean": -39 / 11, "sequence_mean": -3.25, "constant": -39 / 32}
    assert log[0]["loss/policy_avg"] == pytest.approx(expected[aggregation], abs=1e-5)


def test_the_sequence_ratio_is_that_of_the_responses():
    # logprobs lowered by 0.1 and 0.2 on the first row's tokens 0 and 1 of 3: all its ratios are exp(0.1).
    model = tiny_model().eval()
    responses = scored(model, None)
    responses.logprobs[0][:2] -= np.array([0.1, 0.2], np.float32)
    log, _ = run(model, None, responses, settings(ratio="sequence"))
    assert log[0]["val/ratio"] == pytest.approx((3 * np.exp(0.1) + 8) / 11, abs=1e-5)
    assert log[0]["policy/ratio_error_max"] == pytest.approx(np.exp(0.1) - 1, abs=1e-5)


def test_an_update_raises_good_tokens_and_lowers_bad_ones():
    model, critic = tiny_model().eval(), shared_critic()
    responses = scored(model, critic)
    before = np.concatenate(responses.logprobs)
    run(model, critic, responses, settings(ppo_epochs=3, entropy_coef=0.0), learning_rate=3e-4)
    moved = np.concatenate(scored(model, critic).logprobs) - before
    assert float((moved * np.concatenate(responses.advantages)).sum()) > 0


def test_tokens_of_weight_zero_move_nothing():
    model = tiny_model().eval()
    responses = scored(model, None)
    for row in range(4):
        responses.importance_weights[row][:] = 0.0
    _, state = run(model, None, responses, settings(entropy_coef=0.0))
    assert not gradient(state).any()


def test_kl_in_the_loss_pulls_towards_the_reference():
    model, reference = tiny_model().eval(), tiny_model(seed=3).eval()
    responses = replace(scored(model, None), ref_logprobs=scored(reference, None).logprobs)
    for row in range(4):
        responses.advantages[row][:] = 0.0

    def distance():  # k2, which no sampling noise can turn negative
        found, reference = (np.concatenate(rows) for rows in (scored(model, None).logprobs, responses.ref_logprobs))
        return float(np.square(found - reference).mean() / 2)

    before = distance()
    chosen = settings(entropy_coef=0.0, kl_loss_coef=1.0, kl_loss_estimator="k2", ppo_epochs=3)
    log, _ = run(model, None, responses, chosen, learning_rate=1e-3)
    assert log[0]["loss/kl_avg"] == pytest.approx(before, rel=1e-5)
    assert distance() < log[1]["loss/kl_avg"] < before


def test_slots_after_the_last_token_enter_the_value_loss_only():
    # Values equal returns at all 11 tokens. The slots of rows 0 and 2 are off by 2 and 1; the range 5 never clips:
    # the mean over 13 states is 0.5 * (4 + 1) / 13.
    model, critic = tiny_model().eval(), shared_critic()
    plain = scored(model, critic)
    plain = replace(plain, returns=[values.copy() for values in plain.values])
    after = plain.bootstrap_value
    slotted = replace(plain, bootstrap_return=[after[0] + 2, None, after[2] - 1, None])
    logs = {
        name: run(copy.deepcopy(model), copy.deepcopy(critic), rows, settings(value_clip_range=5.0))[0][0]
        for name, rows in (("plain", plain), ("slotted", slotted))
    }
    assert logs["plain"]["loss/value_avg"] == pytest.approx(0.0, abs=1e-9)
    assert logs["slotted"]["loss/value_avg"] == pytest.approx(2.5 / 13, rel=1e-5)
    assert logs["slotted"]["val/squared_error"] == pytest.approx(5 / 13, rel=1e-5)
    for name in logs["plain"]:
        if name not in ("loss/value_avg", "val/squared_error", "grad_norm"):
            assert logs["plain"][name] == logs["slotted"][name], name


def test_the_value_loss_has_the_conventions_factor():
    model, critic = tiny_model().eval(), shared_critic()
    responses = scored(model, critic)
    log, _ = run(model, critic, responses, settings(value_clip_range=None, value_loss_factor=0.25))
    errors = np.concatenate(responses.values) - np.concatenate(responses.returns)
    assert log[0]["loss/value_avg"] == pytest.approx(0.25 * np.square(errors).mean(), rel=1e-5)


def test_the_update_ends_before_the_step_that_is_too_far():
    model = tiny_model().eval()
    responses = scored(model, None)
    free = settings(ppo_epochs=5, minibatch_size=2)
    log, _ = run(copy.deepcopy(model), None, responses, free, learning_rate=1e-3)
    moved = [row["policy/approxkl_k3_avg"] for row in log]
    last = next(step for step in range(1, 10) if moved[step] > max(moved[:step]) * 1.01)
    target = (moved[last] + max(moved[:last])) / 2
    learner = learner_of(model, None, learning_rate=1e-3)
    progress = update(learner, responses, replace(free, target_kl=target), ALONE, lambda metrics: None, None)
    state = learner.state(NO_STATE, steps=len(progress.log), episode=4)
    assert progress.log == log[:last] and state.steps == {"policy": last}
    assert not any(parameter.grad is not None for parameter in model.parameters())
    found = summary(progress)
    assert found["update/stopped_early"] == 1 and found["optimizer_steps"] == last


def test_a_start_that_is_already_too_far_is_an_error():
    model = tiny_model().eval()
    responses = scored(model, None)
    for row in range(4):
        responses.logprobs[row][:] -= 1.0
    with pytest.raises(NumericError, match=r"before any step, approxkl_k3 is 0\.7183.*target_kl = 0\.5"):
        run(model, None, responses, settings(target_kl=0.5, old_logprobs="sampler"))


def test_a_first_ratio_off_one_is_reported_only_where_it_should_be_one(caplog):
    for old_logprobs, warnings in [("sampler", 0), ("trainer", 1)]:
        caplog.clear()
        model = tiny_model().eval()
        responses = scored(model, None)
        responses.logprobs[0][:] -= 0.1
        log, _ = run(model, None, responses, settings(old_logprobs=old_logprobs))
        assert log[0]["policy/ratio_error_max"] == pytest.approx(np.expm1(0.1), abs=1e-5)
        assert len(caplog.records) == warnings


@pytest.mark.parametrize("kind", CRITICS)
def test_two_updates_with_carried_state_equal_one_of_two_epochs(kind, tmp_path):
    model, critic = tiny_model().eval(), CRITICS[kind]()
    modules = [model] if critic is None else [model, critic]
    responses = scored(model, critic)
    whole = copy.deepcopy(modules)
    run(whole[0], whole[1] if critic else None, responses, settings(ppo_epochs=2))
    _, state = run(model, critic, responses, settings())
    save_optimizer(state, tmp_path)
    run(model, critic, responses, settings(), load_optimizer(tmp_path))
    assert torch.equal(weights(*modules), weights(*whole))


def test_without_a_critic_there_is_no_value_loss():
    model = tiny_model().eval()
    log, state = run(model, None, scored(model, None), settings())
    assert not [name for name in log[0] if name.startswith("loss/value") or name.startswith("val/clip")]
    assert state.steps == {"policy": 1}


def test_every_epoch_visits_every_row_once_in_its_own_order():
    batches = list(minibatches(10, epochs=2, minibatch_size=4, seed=3))
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = [*chain(*batches[:3])], [*chain(*batches[3:])]
    assert batches[0] != batches[3]
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert batches == list(minibatches(10, epochs=2, minibatch_size=4, seed=3))


def test_a_non_finite_loss_names_step_and_rows_and_leaves_the_weights():
    model, critic = tiny_model().eval(), shared_critic()
    responses = scored(model, critic)
    responses.advantages[2][1] = np.nan
    before = weights(model, critic)
    with pytest.raises(NumericError, match=r"optimiser step 1, rows .*loss is nan"):
        run(model, critic, responses, settings())
    assert torch.equal(weights(model, critic), before)


def test_a_refused_step_leaves_everything_as_it_was_and_is_counted(caplog):
    # Minibatches of one row, one epoch: without the row of NaN, the same three steps are taken.
    model = tiny_model().eval()
    responses = scored(model, None)
    order = [rows[0] for rows in minibatches(4, epochs=1, minibatch_size=1, seed=1)]
    responses.advantages[order[1]][:] = np.nan
    chosen = settings(minibatch_size=1, max_skipped_steps=1)
    without = copy.deepcopy(model)
    learner = learner_of(model, None, lr_schedule="linear", schedule_steps=10)
    progress = update(learner, responses, chosen, ALONE, lambda metrics: None, None)
    assert (progress.done, progress.skipped, len(progress.log)) == (4, 1, 3)
    assert summary(progress)["update/skipped_steps"] == 1 and summary(progress)["optimizer_steps"] == 3
    assert [row["lr"] for row in progress.log] == pytest.approx([1e-3, 9e-4, 8e-4])
    name = "abcd"[order[1]]
    assert f"iteration 1, optimiser step 2, rows {name}: the loss is nan" in caplog.text
    assert f"Likely cause: advantages of {name}, up to nan" in caplog.text
    responses.advantages[order[1]][:] = 0.0
    other = learner_of(without, None, lr_schedule="linear", schedule_steps=10)
    for row in (order[0], order[2], order[3]):
        ppo._step(other, responses, [row], chosen, ALONE, TokenBudget(64), step=1, first=False)
    assert torch.equal(weights(model), weights(without))


def test_one_refused_step_too_many_ends_the_update(caplog):
    model = tiny_model().eval()
    responses = scored(model, None)
    for row in (0, 1):
        responses.advantages[row][:] = np.inf
    with pytest.raises(NumericError, match=r"inf; look at .*Refused before: 1 steps; ppo_update.max_skipped_steps = 1"):
        run(model, None, responses, settings(minibatch_size=1, max_skipped_steps=1))


def test_an_update_of_refused_steps_alone_is_an_error():
    model = tiny_model().eval()
    responses = scored(model, None)
    responses.ref_logprobs[2][:] = np.nan
    with pytest.raises(NumericError, match="iteration 1: no optimiser step was taken; 1 were refused"):
        run(model, None, responses, settings(max_skipped_steps=5, kl_loss_coef=0.1))


def test_broken_weights_are_named_as_the_cause():
    model, critic = tiny_model().eval(), shared_critic()
    responses = scored(model, critic)
    with torch.no_grad():
        critic.head.bias.fill_(torch.inf)
    with pytest.raises(NumericError, match="Likely cause: the critic's values are not finite"):
        run(model, critic, responses, settings())
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(NumericError, match="Likely cause: the policy's own logprobs are not finite"):
        run(model, critic, responses, settings())


def test_memory_that_runs_out_in_the_backward_pass_changes_nothing(monkeypatch, caplog):
    # Minibatches of 4 rows in micro-batches of 2: the second one fails once, with the first one's gradient there.
    results = []
    for fails in (False, True):
        model, critic = tiny_model().eval(), shared_critic()
        original, calls = ppo.micro_batch_loss, []

        def scarce(*arguments, fails=fails, original=original, calls=calls):
            calls.append(arguments)
            loss, *rest = original(*arguments)
            if fails and len(calls) == 2:
                loss.backward()  # so that the gradient is half of something
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss, *rest

        with monkeypatch.context() as patched:
            patched.setattr(ppo, "micro_batch_loss", scarce)
            log, state = run(model, critic, scored(model, critic), settings(ppo_epochs=2, max_batch_tokens=16))
        results.append((gradient(state), log, len(calls)))
    (one, log, calls), (other, other_log, more) = results
    assert more > calls and "out of memory with a batch of" in caplog.text
    assert torch.allclose(one, other, atol=1e-5, rtol=0)
    assert other_log[0] == pytest.approx(log[0], rel=1e-5, abs=1e-5)


def test_an_update_that_moved_too_far_is_an_error():
    # By hand: logprobs 0.1 nats below those of the policy now: exp(0.1) - 1 - 0.1 = 0.00517 a token.
    model = tiny_model().eval()
    responses = scored(model, None)
    for row in range(4):
        responses.logprobs[row][:] -= 0.1
    learner = learner_of(model, None)
    found = kl_after(learner, responses, settings(max_kl=0.0053, max_batch_tokens=12), ALONE)
    assert found == pytest.approx(np.expm1(0.1) - 0.1, abs=1e-5)
    with pytest.raises(NumericError, match=r"by 0\.00517.*max_kl = 0\.005; no checkpoint was published"):
        kl_after(learner, responses, settings(max_kl=0.005), ALONE)


def test_no_responses_are_an_error():
    model = tiny_model().eval()
    nothing = replace(scored(model, None), sample_ids=[])
    with pytest.raises(RowMismatch, match="found none with at least one token"):
        run(model, None, nothing, settings())


def test_summary_averages_steps():
    log = [
        {"val/ratio": 1.0, "lr": 0.1, "grad_norm": 2.0, "policy/ratio_error_max": 0.0, "val/squared_error": 1.0},
        {"val/ratio": 1.5, "lr": 0.2, "grad_norm": 4.0, "policy/ratio_error_max": 0.5, "val/squared_error": 3.0},
    ]
    assert summary(Progress(done=2, skipped=0, log=log)) == {
        "val/ratio": 1.25, "lr": 0.2, "grad_norm_avg": 3.0, "policy/max_first_ratio_error": 0.0, "optimizer_steps": 2,
        "update/stopped_early": 0, "update/skipped_steps": 0,
    }  # fmt: skip
    critic = [{**row, "critic_grad_norm": 1.0} for row in log]
    assert summary(Progress(done=2, skipped=0, log=critic))["critic_grad_norm_avg"] == 1.0


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_explained_variance_is_that_of_the_critic_as_it_is_now(kind):
    model, critic = tiny_model().eval(), CRITICS[kind]()
    responses = scored(model, critic)
    found = explained_variance_after(learner_of(model, critic), responses, settings(max_batch_tokens=12), ALONE)
    flat = [np.concatenate(column).tolist() for column in (responses.values, responses.returns)]
    assert found == pytest.approx(oracles.explained_variance(*flat), abs=1e-4)


def test_policy_and_critic_are_the_same_after_a_reload(tiny_dir, tmp_path):
    model, critic = load_causal_lm(tiny_dir, device=CPU, precision="float32"), shared_critic()
    before = scored(model, critic)
    save_like(model, tiny_dir, tmp_path / "policy", card="x")
    save_critic(critic, tmp_path / "critic")
    again = load_causal_lm(tmp_path / "policy", device=CPU, precision="float32")
    after = scored(again, load_critic(tmp_path / "critic", policy=again, device=CPU, precision="float32"))
    for name in ("logprobs", "values"):
        assert np.array_equal(np.concatenate(getattr(before, name)), np.concatenate(getattr(after, name)))


def test_tokens_that_the_head_forbids_leave_a_step_finite():
    """A vocabulary padded by a bias of -inf: 0 * -inf in the entropy would make the loss, and then all weights, NaN."""
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model, critic = PhiForCausalLM(config).eval(), shared_critic()
    with torch.no_grad():
        model.lm_head.bias[90:] = -torch.inf
    check_head(model)
    for chosen in (settings(entropy_coef=0.1), settings(entropy_coef=0.0)):
        log, _ = run(model, critic, scored(model, critic), chosen)
        assert 0 < log[0]["policy/entropy_avg"] < np.log(90) and log[0]["policy/ratio_error_max"] <= 1e-4
        assert torch.isfinite(weights(model.model, critic)).all()
    assert torch.isneginf(model.lm_head.bias[90:]).all() and torch.isfinite(model.lm_head.bias[:90]).all()
