"""Room on the disk, checked before long work: what each stage asks for is what it then writes."""

from pathlib import Path

import pytest

from rlhf_core.disk import directory_bytes
from rlhf_core.errors import DiskError
from stages import ppo_update, score, train_rm
from tests.stages.test_ppo_update import scored
from tests.tiny_run import change, stage

CHECKPOINTS = Path("data/checkpoints")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that stages asked for."""
    found: list[int] = []
    for module in (score, train_rm, ppo_update):
        monkeypatch.setattr(module, "require_space", lambda directory, needed, what: found.append(needed))
    return found


def tensors(*places: Path) -> int:
    """Bytes of all files of tensors."""
    return sum(path.stat().st_size for place in places for path in place.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("module", "arguments", "work", "said"),
    [
        (score, ("1", "0"), "run_other_sources", "data/scores|.work.*what the models compute takes about"),
        (train_rm, (), "fit", "data/checkpoints/reward_model: the reward model takes about"),
        (ppo_update, ("1", "0"), "update", "data/checkpoints: the new checkpoint with AdamW's two moments"),
    ],
)
def test_a_full_disk_is_told_before_the_work_starts(project, monkeypatch, module, arguments, work, said):
    if module is ppo_update:
        scored(monkeypatch)
    monkeypatch.setattr("rlhf_core.disk.free_bytes", lambda path: 100)
    monkeypatch.setattr(module, work, lambda *given, **named: pytest.fail("it started"))
    with pytest.raises(DiskError, match=rf"(?s){said}.*, 100 bytes are free"):
        stage(module, monkeypatch, *arguments)


def test_score_asks_for_what_it_writes(project, monkeypatch, asked):
    stage(score, monkeypatch, "1", "0")
    written = directory_bytes(Path(".work")) + directory_bytes(Path("data/scores"))
    assert written < asked[0] < 4 * written


# A save is weights and two moments, and after the first of several epochs the best weights so far.
@pytest.mark.parametrize(("epochs", "save_every"), [(1, 0), (1, 1), (2, 1), (2, 100)])
def test_train_rm_asks_for_what_it_writes(project, monkeypatch, asked, epochs, save_every):
    change("train_rm", epochs=epochs, save_every=save_every)
    stage(train_rm, monkeypatch)
    model, save = tensors(CHECKPOINTS / "reward_model"), tensors(Path(".work"))
    assert asked == [pytest.approx(max(model + save, 2 * save), rel=0.02)]


@pytest.mark.parametrize(("save_every", "rank"), [(0, 0), (1, 0), (100, 0), (1, 16)])
def test_ppo_update_asks_for_what_it_writes(project, monkeypatch, asked, save_every, rank):
    scored(monkeypatch)
    change("ppo_update", save_every=save_every, lora_rank=rank)
    stage(ppo_update, monkeypatch, "1", "0")
    new = [CHECKPOINTS / name / "1" for name in ("policy", "critic", "optimizer")]
    assert asked[1:] == [pytest.approx(tensors(*new, Path(".work")), rel=0.05)]  # less the headers of small files
