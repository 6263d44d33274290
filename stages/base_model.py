"""Write the base model as the policy, critic and optimiser state that iteration "1" starts from."""

from pathlib import Path

from rlhf_core.config import load_run
from rlhf_core.models.checkpoint import OptimizerState, new_value_head, save_critic, save_optimizer
from rlhf_core.models.loading import fetch_base_model, save_pretrained
from rlhf_core.stage import publish, run_stage, work_directory

CHECKPOINTS = Path("data/checkpoints")


def main() -> None:
    """Fetch the model, add a zero value head and an empty optimiser state, publish the three directories."""
    params = load_run().params.base_model
    work = work_directory("base_model", {"params": params.model_dump()})
    model, tokenizer = fetch_base_model(
        params.source, revision=params.revision, trust_remote_code=params.trust_remote_code
    )
    origin = f"Source: `{params.source}`, revision: `{params.revision}`."
    card = f"# Base model\n\n{origin} Iteration 0 of this run; also its reference model.\n"
    save_pretrained(model, tokenizer, work / "policy", card=card)
    save_critic(new_value_head(model.config.get_text_config().hidden_size), work / "critic")
    save_optimizer(OptimizerState(step=0, episode=0, first_moments={}, second_moments={}), work / "optimizer")
    for name in ("policy", "critic", "optimizer"):
        publish(work / name, CHECKPOINTS / name / "0")


if __name__ == "__main__":
    run_stage("base_model", main)
