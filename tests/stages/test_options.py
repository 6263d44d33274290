"""Every option of the maths, from rollouts to a checkpoint: it runs, it reaches the files it should, and no others.

Each case changes params.yaml, runs score, advantages and ppo_update on the same responses, and compares with the
defaults: an option that is parsed and then ignored would leave all bytes as they are.
"""

import contextlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.shards import read_table
from stages import advantages, init_critic, ppo_update, score
from tests.tiny_run import change, stage, write_rollouts

# What an option must change, as compared with the defaults: nothing in the columns of any file before it.
SCORES, ADVANTAGES, POLICY, NOTHING = "scores", "advantages", "policy", "nothing"
NO_CRITIC = {"critic": {"kind": "none"}}

CASES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    # advantage estimators
    "reward_minus_value": (ADVANTAGES, {"advantages": {"estimator": "reward_minus_value"}}),
    "rloo": (ADVANTAGES, {"advantages": {"estimator": "rloo"}}),
    "grpo": (ADVANTAGES, {"advantages": {"estimator": "grpo"}}),
    "dr_grpo": (ADVANTAGES, {"advantages": {"estimator": "dr_grpo"}, "ppo_update": {"aggregation": "constant"}}),
    "reinforce_plus_plus": (ADVANTAGES, {"advantages": {"estimator": "reinforce_plus_plus"}}),
    "reinforce_plus_plus_baseline": (ADVANTAGES, {"advantages": {"estimator": "reinforce_plus_plus_baseline"}}),
    "rloo_without_critic": (SCORES, NO_CRITIC | {"advantages": {"estimator": "rloo"}}),
    "grpo_without_critic": (SCORES, NO_CRITIC | {"advantages": {"estimator": "grpo"}}),
    "gamma": (ADVANTAGES, {"advantages": {"gamma": 0.9}}),
    "gae_lambda": (ADVANTAGES, {"advantages": {"gae_lambda": 0.5}}),
    "value_gae_lambda": (ADVANTAGES, {"advantages": {"value_gae_lambda": 1.0, "gae_lambda": 0.5}}),
    "no_whitening": (ADVANTAGES, {"advantages": {"whiten_advantages": False}}),
    "bessel": (ADVANTAGES, {"advantages": {"whitening_variance": "bessel"}}),
    # reward shaping
    "missing_eos_replace": (ADVANTAGES, {"advantages": {"missing_eos_mode": "replace"}}),
    "missing_eos_scale": (ADVANTAGES, {"advantages": {"missing_eos_mode": "scale", "missing_eos_penalty": 0.5}}),
    "overlong": (ADVANTAGES, {"advantages": {"overlong_buffer": 38}}),
    "score_clip": (ADVANTAGES, {"advantages": {"score_clip": 0.1}}),
    "score_running_std": (ADVANTAGES, {"advantages": {"score_scaling": "running_std"}}),
    "score_running_mean_std": (ADVANTAGES, {"advantages": {"score_scaling": "running_mean_std"}}),
    "whiten_rewards": (ADVANTAGES, {"advantages": {"whiten_rewards": True}}),
    # conventions of others
    "trl": (ADVANTAGES, {"conventions": "trl"}),
    "verl": (ADVANTAGES, {"conventions": "verl"}),
    "openrlhf": (NOTHING, {"conventions": "openrlhf"}),  # differs by bounds that these responses do not reach
    # policy loss
    "clip_higher": (POLICY, {"ppo_update": {"clip_range_high": 0.5}}),
    "dual_clip": (POLICY, {"ppo_update": {"dual_clip": 1.001}}),
    "sequence_ratio": (POLICY, {"ppo_update": {"ratio": "sequence"}}),
    "sequence_mean": (POLICY, {"ppo_update": {"aggregation": "sequence_mean"}}),
    "constant": (POLICY, {"ppo_update": {"aggregation": "constant", "aggregation_constant": 16.0}}),
    "entropy": (POLICY, {"ppo_update": {"entropy_coef": 0.5}}),
    "value_coef": (POLICY, {"ppo_update": {"value_coef": 1.0}}),
    "weight_decay": (POLICY, {"ppo_update": {"weight_decay": 0.1}}),
    "adam_betas": (POLICY, {"ppo_update": {"adam_betas": [0.8, 0.9]}}),
    "adam_eps": (POLICY, {"ppo_update": {"adam_eps": 1e-3}}),
    "max_grad_norm": (POLICY, {"ppo_update": {"max_grad_norm": 0.01}}),
    "warmup_steps": (POLICY, {"ppo_update": {"warmup_steps": 3}}),
    "cosine": (POLICY, {"ppo_update": {"lr_schedule": "cosine", "schedule_steps": 4}}),
    "sampler_logprobs": (POLICY, {"ppo_update": {"old_logprobs": "sampler"}}),
    # critic
    "unclipped_value_loss": (POLICY, {"ppo_update": {"value_clip_range": None, "value_head_learning_rate": 0.5}}),
    "separate_critic": (SCORES, {"critic": {"kind": "separate", "init": "reward_model"}}),
    "warm_up": (POLICY, {"ppo_update": {"critic_warmup_iterations": 1}}),
    # off-policy correction
    "truncate": (ADVANTAGES, {"advantages": {"correction": "truncate", "correction_max": 1.01}}),
    "mask": (ADVANTAGES, {"advantages": {"correction": "mask", "correction_max": 1.01}}),
    "reject_sequence": (ADVANTAGES, {"advantages": {"correction": "reject_sequence", "correction_max": 1.01}}),
}
# Options that act on the KL to the reference need a policy that is no longer the reference: the second iteration.
SECOND: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "k2": (ADVANTAGES, {"advantages": {"kl_estimator": "k2"}}),
    "k3": (ADVANTAGES, {"advantages": {"kl_estimator": "k3"}}),
    "absolute": (ADVANTAGES, {"advantages": {"kl_estimator": "absolute"}}),
    "full": (SCORES, {"advantages": {"kl_estimator": "full"}, "score": {"full_kl": True}}),
    "no_kl": (ADVANTAGES, {"advantages": {"kl_coef": 0.0}}),
    **{
        f"kl_loss_{name}": (POLICY, {"ppo_update": {"kl_loss_coef": 0.5, "kl_loss_estimator": name}})
        for name in ("k1", "k2", "k3", "absolute")
    },
    "target_kl": (POLICY, {"ppo_update": {"target_kl": 1e-6}}),
    "adaptive": (ADVANTAGES, {"advantages": {"kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 10}}),
    "running_moments": (ADVANTAGES, {"advantages": {"score_scaling": "running_mean_std"}}),
    "replay": (SCORES, {"score": {"replay": [1]}, "advantages": {"correction": "truncate"}}),
    "replay_by_sampler": (SCORES, {"score": {"replay": [1]}, "ppo_update": {"old_logprobs": "sampler"}}),
}
# The sampler disagrees a little about some rows, so that corrections have something to correct.
SHIFT = {0: 0.05, 1: -0.05, 3: 0.02}


def apply(changes: dict[str, Any]) -> None:
    """Change params.yaml, groups and top-level values alike."""
    for section, values in changes.items():
        if isinstance(values, dict):
            change(section, **values)
        else:
            text = Path("params.yaml").read_text()
            assert text.count(f"{section}: ours") == 1
            Path("params.yaml").write_text(text.replace(f"{section}: ours", f"{section}: {values}"))


def iterate(monkeypatch: pytest.MonkeyPatch, iteration: str, prev: str) -> dict[str, str]:
    """Run an iteration from its rollouts on, and return what its files hold, by kind."""
    stage(score, monkeypatch, iteration, prev)
    stage(advantages, monkeypatch, iteration, prev)
    stage(ppo_update, monkeypatch, iteration, prev)
    found = {}
    for kind, appended in ((SCORES, "logprobs"), (ADVANTAGES, "importance_weights")):
        table = read_table(Path(f"data/{kind}/iteration={iteration}"))
        columns = table.column_names[table.column_names.index(appended) :]
        found[kind] = str(table.select(columns).to_pydict())  # content alone: metadata names the parameters
    weights = [Path(f"data/checkpoints/{kind}/{iteration}") for kind in ("policy", "critic", "optimizer")]
    found[POLICY] = str([hash_path(path) for each in weights for path in sorted(each.rglob("*.safetensors"))])
    for stage_name in ("score", "advantages", "ppo_update"):
        metrics = json.loads(Path(f"data/metrics/{stage_name}/{iteration}.json").read_text())
        assert all(math.isfinite(value) for value in metrics.values()), metrics
    return found


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory, made_run: Path) -> dict[str, tuple[Path, dict[str, str]]]:
    """Projects after their first and second iteration with the defaults, and what those hold. Not to be written to."""
    root = shutil.copytree(made_run, tmp_path_factory.mktemp("options") / "first")
    second = root.with_name("second")
    with pytest.MonkeyPatch.context() as patched:
        with contextlib.chdir(root):
            change("ppo_update", learning_rate=1e-4)  # small enough that some ratios lie between two clip ranges
            write_rollouts(shift=SHIFT)
            first = iterate(patched, "1", "0")
            write_rollouts("2", "1")
        shutil.copytree(root, second)
        with contextlib.chdir(second):
            return {"1": (root, first), "2": (second, iterate(patched, "2", "1"))}


def check(changed: str, found: dict[str, str], default: dict[str, str]) -> None:
    """Every kind of file from `changed` on differs from the default's, and none before it does."""
    kinds = [SCORES, ADVANTAGES, POLICY, NOTHING]
    differs = [kind for kind in kinds[:-1] if found[kind] != default[kind]]
    assert differs == kinds[kinds.index(changed) : -1]


@pytest.mark.parametrize("name", CASES)
def test_an_option_runs_and_changes_what_it_should(name, after, tmp_path, monkeypatch):
    changed, changes = CASES[name]
    source, default = after["1"]
    monkeypatch.chdir(shutil.copytree(source, tmp_path / "project"))
    apply(changes)
    stage(init_critic, monkeypatch)
    check(changed, iterate(monkeypatch, "1", "0"), default)


@pytest.mark.parametrize("name", SECOND)
def test_an_option_on_the_kl_or_on_earlier_iterations_runs_and_changes_what_it_should(
    name, after, tmp_path, monkeypatch
):
    changed, changes = SECOND[name]
    source, default = after["2"]
    monkeypatch.chdir(shutil.copytree(source, tmp_path / "project"))
    apply(changes)
    if name in ("adaptive", "running_moments"):  # what they carry over comes from the first iteration
        stage(advantages, monkeypatch, "1", "0")
    check(changed, iterate(monkeypatch, "2", "1"), default)
