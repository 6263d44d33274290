"""Stages that are killed with SIGKILL, at twenty and more random moments, lose nothing, double nothing, and end in the
same bytes.

Mutations that must fail here: the schedule's position, the moments or the log left out of a save; training that goes on
one minibatch too early or too late; the save of other parameters used; a shard scored again that was done.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.reward import passes
from rlhf_core.training import ppo, reward_model
from stages import init_critic, ppo_update, score, train_rm
from tests.killed import (
    DONE,
    clear,
    contents,
    different,
    finish,
    kill_many_times,
    kill_when,
    note,
    noted,
    said,
    start,
    together,
    wait,
)
from tests.stages.test_ppo_update import scored
from tests.tiny_run import change

KILLS = 20
UPDATE = [Path(f"data/checkpoints/{name}/1") for name in ("policy", "critic", "optimizer")]
UPDATE += [Path("data/metrics/ppo_update/1.json"), Path("data/plots/ppo_update/1.csv")]
REWARD_MODEL = [Path("data/checkpoints/reward_model"), Path("data/metrics/train_rm.json")]
SCORES = [Path("data/scores/iteration=1"), Path("data/mismatch/1.json"), Path("data/metrics/score/1.json")]
SMALL_STEPS: dict[str, Any] = {"minibatch_size": 2, "ppo_epochs": 4, "save_every": 5, "learning_rate": 1e-4}  # 12 steps


def save_exists(done: int) -> bool:
    """Whether the state after so many minibatches of iteration 1's update is kept."""
    return any(Path(".work/ppo_update-1").glob(f"*/saves/{done:08d}"))


def update(*, processes: int = 1) -> None:
    """Run the update of iteration 1 to its end."""
    assert wait(*together("ppo_update@1", ppo_update.main, "1", "0", processes=processes)) == [DONE] * processes, said()


def check_steps(processes: Iterator[tuple[list[str], bool]], *, save_every: int) -> None:
    """Check that every process goes on where the one before was killed: no step left out, at most save_every again."""
    reached, published = 0, False
    for steps, publishes in processes:
        numbers = [int(step) for step in steps]
        first = numbers[0] if numbers else reached
        assert numbers == list(range(first, first + len(numbers)))
        assert (0 if published else reached - save_every) <= first <= reached
        reached = max(reached if not published else 0, first + len(numbers))
        # One that was killed before its first step leaves open whether there is partial work to go on from.
        published = publishes or (published and not numbers)


def test_an_update_killed_at_any_moment_takes_few_steps_again(project, monkeypatch):
    scored(monkeypatch)
    change("ppo_update", **SMALL_STEPS, lr_schedule="cosine", schedule_steps=30, warmup_steps=5)
    note(monkeypatch, ppo, "_step", lambda *_, step, first: step)
    ran = kill_many_times("ppo_update@1", ppo_update.main, "1", "0", outs=UPDATE, kills=KILLS)
    check_steps(noted(ran), save_every=5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("separate", {}),
        ("none", {}),
        ("separate", {"critic_warmup_iterations": 1}),
        ("shared", {"target_kl": 0.02}),
        ("shared", {"max_kl": 10.0, "target_kl": 10.0}),
        ("shared", {"lora_rank": 2, "lora_targets": ["q_proj"]}),
    ],
)
def test_a_resumed_update_ends_in_the_same_bytes(project, monkeypatch, kind, options):
    change("critic", kind=kind)
    change("advantages", estimator="rloo" if kind == "none" else "gae")
    init_critic.main()
    scored(monkeypatch)
    change("ppo_update", **{**SMALL_STEPS, "save_every": 2, **options})
    finish("ppo_update@1", ppo_update.main, "1", "0")
    expected = contents(*UPDATE)
    clear(UPDATE)
    kill_when(lambda: save_exists(2), start("ppo_update@1", ppo_update.main, "1", "0"))
    note(monkeypatch, ppo, "_step", lambda *_, step, first: step)
    child = finish("ppo_update@1", ppo_update.main, "1", "0")
    assert different(contents(*UPDATE), expected) == []
    [(steps, _)] = noted([(child, True)])
    assert 0 < len(steps) < 12 and int(steps[0]) in (2, 4, 6, 8, 10)


def test_two_processes_resume_together(project, monkeypatch):
    scored(monkeypatch)
    change("ppo_update", **SMALL_STEPS)
    change("compute", processes=2)
    update(processes=2)
    expected = contents(*UPDATE)
    clear(UPDATE)
    kill_when(lambda: save_exists(5), *together("ppo_update@1", ppo_update.main, "1", "0", processes=2))
    note(monkeypatch, ppo, "_step", lambda *_, step, first: step)
    update(processes=2)
    assert different(contents(*UPDATE), expected) == []
    steps = [line.split()[1] for line in Path("noted").read_text().splitlines()]
    assert len(steps) in (4, 14) and set(steps) <= {str(step) for step in range(5, 12)}


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}])
def test_a_reward_model_killed_at_any_moment_takes_few_steps_again(project, monkeypatch, options):
    # 12 pairs in batches of 4: 3 steps in each of 4 epochs, of which the best is kept.
    change("train_rm", epochs=4, save_every=2, learning_rate=1e-3, **options)
    note(
        monkeypatch, reward_model, "clip_and_step", lambda *_, where, **__: int(re.search(r"step (\d+)", where)[1]) - 1
    )
    ran = kill_many_times("train_rm", train_rm.main, outs=REWARD_MODEL, kills=3 if options else KILLS)
    check_steps(noted(ran), save_every=2)


def test_scores_killed_at_any_moment_are_computed_once_for_each_shard(project, monkeypatch):
    note(monkeypatch, passes, "save_array", lambda path, array: path)
    ran = kill_many_times("score@1", score.main, "1", "0", outs=SCORES, kills=KILLS)
    found: Counter[str] = Counter()
    for paths, published in noted(ran):
        found.update(paths)
        # What a shared critic says is written before the logprobs that say that all is done, so a kill between them
        # repeats it.
        assert all(count == 1 for path, count in found.items() if not re.search("/(bootstrap_value|values)/", path))
        if published:
            found.clear()
