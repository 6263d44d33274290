"""What is trained, how it is clipped, and the optimiser's state between iterations.

Mutations that must fail here: the policy trained in warm-up; its moments lost there; one clip for policy and separate
critic; a state of other parameters accepted; steps counted for parts that stood still.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rlhf_core.errors import ModelError
from rlhf_core.models.checkpoint import load_optimizer, save_optimizer
from rlhf_core.training.optimizer import adamw, clip_and_step, schedule
from tests.ppo_case import learner_of, run, scored, separate_critic, settings, shared_critic, weights
from tests.tiny import tiny_model

CRITICS = {"shared": shared_critic, "separate": separate_critic}


@pytest.mark.parametrize("kind", CRITICS)
def test_in_warm_up_only_the_critic_moves(kind):
    model, critic = tiny_model().eval(), CRITICS[kind]()
    responses = scored(model, critic)
    policy, value = weights(model), weights(critic)
    log, state = run(model, critic, responses, settings(ppo_epochs=2), critic_only=True)
    assert torch.equal(weights(model), policy) and not torch.equal(weights(critic), value)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    parts = {"value_head"} | ({"critic"} if kind == "separate" else set())
    assert state.steps == {part: 2 for part in parts}
    assert {name.split(".")[0] for name in state.first_moments} == parts
    assert log[1]["loss/value_avg"] < log[0]["loss/value_avg"]
    assert log[1]["policy/approxkl_avg"] < 1e-9


def test_in_warm_up_no_policy_can_move_too_far():
    model, critic = tiny_model().eval(), shared_critic()
    responses = scored(model, critic)
    for row in range(4):
        responses.logprobs[row][:] -= 1.0
    chosen = settings(target_kl=0.1, old_logprobs="sampler")
    log, _ = run(model, critic, responses, chosen, critic_only=True)
    assert len(log) == 1


@pytest.mark.parametrize("kind", CRITICS)
def test_an_update_after_warm_up_goes_on_from_its_state(kind, tmp_path):
    model, critic = tiny_model().eval(), CRITICS[kind]()
    responses = scored(model, critic)
    _, state = run(model, critic, responses, settings(), critic_only=True)
    save_optimizer(state, tmp_path)
    model.requires_grad_(True)  # as a freshly loaded one
    _, after = run(model, critic, responses, settings(), load_optimizer(tmp_path))
    assert after.steps["policy"] == 1 and after.steps["value_head"] == 2
    assert after.first_moments["policy.model.norm.weight"].any()


def test_the_policy_s_moments_stand_still_in_warm_up(tmp_path):
    model, critic = tiny_model().eval(), shared_critic()
    responses = scored(model, critic)
    _, state = run(model, critic, responses, settings())
    save_optimizer(state, tmp_path)
    _, after = run(model, critic, responses, settings(), load_optimizer(tmp_path), critic_only=True)
    kept = load_optimizer(tmp_path)
    assert after.steps == {"policy": 1, "value_head": 2}
    for name, moment in kept.first_moments.items():
        assert torch.equal(after.first_moments[name], moment) == name.startswith("policy."), name
        assert torch.equal(after.second_moments[name], kept.second_moments[name]) == name.startswith("policy."), name


def test_a_separate_critic_is_clipped_by_itself():
    together, apart = (
        learner_of(tiny_model(), critic).clip_groups() for critic in (shared_critic(), separate_critic())
    )
    assert {name: len(group) for name, group in together.items()} == {
        "grad_norm": len(list(tiny_model().parameters())) + 2
    }
    assert apart.keys() == {"grad_norm", "critic_grad_norm"}
    assert len(apart["critic_grad_norm"]) == len(list(tiny_model().model.parameters())) + 2


def test_a_separate_critic_s_large_gradient_does_not_shrink_the_policy_s():
    norms = []
    for scale in (1.0, 1e4):
        model, critic = tiny_model().eval(), separate_critic()
        responses = scored(model, critic)
        responses = replace(responses, returns=[scale * returns for returns in responses.returns])
        log, state = run(model, critic, responses, settings(value_clip_range=None, max_grad_norm=1.0))
        norms.append(log[0]["grad_norm"])
        clipped = [10 * state.first_moments[name] for name in state.first_moments if name.startswith("policy.")]
        norm = torch.cat([moment.flatten() for moment in clipped]).norm()
        assert float(norm) == pytest.approx(min(log[0]["grad_norm"], 1.0), rel=1e-4)
    assert norms[0] == norms[1]


def test_each_part_has_its_own_learning_rate():
    rates = {"learning_rate": 1e-3, "value_head_learning_rate": 2e-3, "critic_learning_rate": 3e-3}
    learner = learner_of(tiny_model(), separate_critic(), **rates)
    found = dict(zip(learner.parts, (group["lr"] for group in learner.optimizer.param_groups), strict=True))
    assert found == {"policy": 1e-3, "value_head": 2e-3, "critic": 3e-3}


def test_the_schedule_counts_the_steps_of_the_part_that_took_most():
    learner = learner_of(tiny_model(), shared_critic(), lr_schedule="linear", schedule_steps=10, learning_rate=1.0)
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(1.0)
    model, critic = tiny_model().eval(), shared_critic()
    _, state = run(model, critic, scored(model, critic), settings(ppo_epochs=4), critic_only=True)
    model.requires_grad_(True)
    learner = learner_of(model, critic, state, lr_schedule="linear", schedule_steps=10, learning_rate=1.0)
    assert learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.6)  # (10 - 4) / 10


def test_the_learning_rate_that_is_logged_is_the_one_of_the_step():
    model, critic = tiny_model().eval(), shared_critic()
    options = {"lr_schedule": "linear", "schedule_steps": 10, "warmup_steps": 2, "learning_rate": 1e-3}
    log, state = run(model, critic, scored(model, critic), settings(ppo_epochs=4), **options)
    # 1/3 and 2/3 of the warm-up, then (10 - s) / 8.
    assert [row["lr"] for row in log] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 0.875e-3])
    log, _ = run(model, critic, scored(model, critic), settings(ppo_epochs=2), state, **options)
    assert [row["lr"] for row in log] == pytest.approx([0.75e-3, 0.625e-3])


def test_optimizer_state_of_other_parameters_is_refused():
    model, critic = tiny_model().eval(), shared_critic()
    _, state = run(model, critic, scored(model, critic), settings())
    with pytest.raises(ModelError, match=r"other parameters than the policy and critic: value_head\.bias"):
        learner_of(model, None, state)
    with pytest.raises(ModelError, match="other parameters"):
        learner_of(nn.Linear(3, 1), critic, state)  # type: ignore[arg-type]
    lost = dict(state.second_moments)
    del lost["policy.model.norm.weight"]
    with pytest.raises(ModelError, match=r"other parameters.*policy\.model\.norm\.weight"):
        learner_of(model, critic, replace(state, second_moments=lost))


def test_optimizer_state_of_another_shape_is_refused():
    model, critic = tiny_model().eval(), shared_critic()
    _, state = run(model, critic, scored(model, critic), settings())
    moments = {**state.first_moments, "value_head.weight": torch.zeros(1, 32)}
    with pytest.raises(ModelError, match=r"value_head\.weight has shape \[1, 32\], expected \[1, 64\]"):
        learner_of(model, critic, replace(state, first_moments=moments))


def test_the_state_is_the_same_after_a_reload(tmp_path):
    model, critic = tiny_model().eval(), separate_critic()
    _, state = run(model, critic, scored(model, critic), settings())
    save_optimizer(state, tmp_path)
    again = load_optimizer(tmp_path)
    assert (again.steps, again.episode) == ({"policy": 1, "value_head": 1, "critic": 1}, 4)
    assert again.first_moments.keys() == state.first_moments.keys() == state.second_moments.keys()
    assert all(torch.equal(again.second_moments[name], moment) for name, moment in state.second_moments.items())


@pytest.mark.parametrize(
    ("name", "first_step", "expected"),
    [
        ("constant", 7, [1.0, 1.0]),
        ("constant", 0, [1 / 3, 2 / 3]),  # two warm-up steps, none of them at a rate of 0: 1/3, 2/3
        ("linear", 0, [1 / 3, 2 / 3]),
        ("linear", 6, [0.5, 0.375]),  # then (10 - step) / (10 - 2)
        ("cosine", 6, [0.5, 0.3086583]),  # 0.5 (1 + cos(pi (step - 2) / 8))
        ("linear", 10, [0.0, 0.0]),
        ("cosine", 10, [0.0, 0.0]),
        ("cosine", 17, [0.0, 0.0]),  # a cosine of the step alone would be back at 0.96 there
    ],
)
def test_schedules_continue_where_the_last_iteration_stopped(name, first_step, expected):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = adamw([([("p", parameter)], 1.0)], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, kind="adamw")
    scheduler = schedule(optimizer, name=name, warmup_steps=2, total_steps=10, first_step=first_step)
    found = [optimizer.param_groups[0]["lr"]]
    optimizer.step()
    scheduler.step()
    found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_step_is_adamw_s_with_its_own_betas_eps_and_decay():
    # Gradient 2 clipped to norm 1: m = 0.2 * 1, v = 0.1 * 1; corrected by 1 - 0.8 and 1 - 0.9 both are 1.
    # w = 3 * (1 - 0.5 * 0.1) - 0.5 * 1 / (sqrt(1) + 0.25) = 2.85 - 0.4
    parameter = nn.Parameter(torch.tensor([3.0]))
    optimizer = adamw([([("p", parameter)], 0.5)], betas=(0.8, 0.9), eps=0.25, weight_decay=0.1, kind="adamw")
    scheduler = schedule(optimizer, name="constant", warmup_steps=0, total_steps=1, first_step=0)
    parameter.grad = torch.tensor([2.0])
    norms = clip_and_step(optimizer, scheduler, {"g": [parameter]}, max_grad_norm=1.0, where="here")
    assert norms == {"g": 2.0}
    assert parameter.item() == pytest.approx(2.45, abs=1e-5)
    assert parameter.grad is None
    # Gradient 0: m = 0.16 of 1 - 0.64, v = 0.09 of 1 - 0.81; 2.45 * 0.95 - 0.5 * 0.444444 / (0.688247 + 0.25).
    clip_and_step(optimizer, scheduler, {"g": [parameter]}, max_grad_norm=1.0, where="here")
    assert parameter.item() == pytest.approx(2.090652, abs=1e-5)


def test_a_parameter_that_took_no_part_counts_as_one_with_gradient_zero():
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = adamw(
        [([("a", used), ("b", unused)], 0.1)], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, kind="adamw"
    )
    scheduler = schedule(optimizer, name="constant", warmup_steps=0, total_steps=1, first_step=0)
    used.grad = torch.ones(1)
    clip_and_step(optimizer, scheduler, {"g": [used, unused]}, max_grad_norm=1.0, where="here")
    assert unused.item() == 1.0
    assert optimizer.state[unused]["exp_avg"].tolist() == [0.0]
