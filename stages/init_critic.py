"""Write the critic that iteration "1" starts from: `python -m stages.init_critic`."""

from pathlib import Path

from rlhf_core.artifacts.lineage import write_lineage
from rlhf_core.artifacts.provenance import hash_path, hash_tokenizer
from rlhf_core.config import ComputeParams, load_run
from rlhf_core.errors import ModelError
from rlhf_core.models.checkpoint import load_normalisation, new_value_head, save_critic
from rlhf_core.models.critic import Critic, check_causal, check_vocabulary, reward_critic
from rlhf_core.models.loading import hidden_size, load_backbone, load_classifier, local_directory, torch_device
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.stage import publish, run_stage, work_directory

CHECKPOINTS = Path("data/checkpoints")
POLICY, REWARD_MODEL, OUT = CHECKPOINTS / "policy/0", CHECKPOINTS / "reward_model", CHECKPOINTS / "critic/0"


def main() -> None:
    """Make the critic of the kind that critic.kind names and publish it."""
    params = load_run().params
    inputs = {"policy": hash_path(POLICY), "reward_model": hash_path(REWARD_MODEL)}
    work = work_directory("init_critic", {**inputs, **params.model_dump(include={"compute", "critic"})})
    critic, used = None, [POLICY]
    if params.critic.kind == "shared":
        critic = Critic(new_value_head(hidden_size(POLICY)))
    elif params.critic.kind == "separate":
        critic = separate_critic(params.critic.init, params.compute)
        used += [REWARD_MODEL] if params.critic.init == "reward_model" else []
    save_critic(critic, work / "critic")
    write_lineage(work / "critic", stage="init_critic", inputs={str(path): hash_path(path) for path in used})
    publish(work / "critic", OUT)


def separate_critic(init: str, compute: ComputeParams) -> Critic:
    """Return a critic with a backbone of its own.

    Args:
        init: policy, reward_model (with its head, so that V starts as the normalised score of what it has read so
            far), or a Hugging Face id or directory; the others get a head that predicts 0.
        compute: Where it is made, and in which dtype.

    Raises:
        ModelError: If the model is absent, reads other token ids than the policy, or sees tokens that come later.
    """
    device, precision = torch_device(compute.device), compute.precision
    if init == "reward_model":
        if not (REWARD_MODEL / "config.json").is_file():
            raise ModelError(
                f"critic.init is reward_model, but {REWARD_MODEL} holds none: there were no preference pairs to train"
                " one on; set critic.init to policy, or ingest preferences"
            )
        check_tokenizer(REWARD_MODEL)
        critic = reward_critic(
            load_classifier(REWARD_MODEL, device=device, precision=precision), *load_normalisation(REWARD_MODEL)
        )
        where = REWARD_MODEL
    else:
        where = POLICY if init == "policy" else local_directory(init)
        check_tokenizer(where)
        backbone = load_backbone(where, device=device, precision=precision)
        critic = Critic(new_value_head(hidden_size(where)).to(device), backbone)
    check_causal(critic, where)
    check_vocabulary(critic, where, tokens=len(load_tokenizer(POLICY)))
    return critic


def check_tokenizer(directory: Path) -> None:
    """Check that a model reads the policy's token ids.

    Raises:
        ModelError: Naming the directory.
    """
    if hash_tokenizer(directory) != hash_tokenizer(POLICY):
        raise ModelError(
            f"critic.init {directory}: its tokenizer is not the policy's; a critic reads the policy's token ids. Give a"
            " model with the same tokenizer files, or set critic.init to policy"
        )


if __name__ == "__main__":
    run_stage("init_critic", main)
