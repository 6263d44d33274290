"""Write the base model as the policy, and the optimiser and reward state, that iteration "1" starts from."""

from pathlib import Path

from rlhf_core.artifacts.lineage import write_lineage
from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.config import load_run
from rlhf_core.models.checkpoint import OptimizerState, save_optimizer
from rlhf_core.models.loading import fetch_base_model, save_pretrained
from rlhf_core.stage import publish, run_stage, work_directory, write_json

CHECKPOINTS, REWARD_STATE = Path("data/checkpoints"), Path("data/reward_state/0.json")
# No controller has moved the KL coefficient, and no score has been seen.
FIRST_REWARD_STATE = {"kl_coef": None, "scores": {"count": 0, "mean": 0.0, "m2": 0.0}}


def main() -> None:
    """Fetch the model, describe an optimiser and a reward shaping that have seen nothing, publish all three."""
    params = load_run().params.base_model
    work = work_directory("base_model", {"params": params.model_dump()})
    model, tokenizer = fetch_base_model(
        params.source, revision=params.revision, trust_remote_code=params.trust_remote_code
    )
    origin = f"Source: `{params.source}`, revision: `{params.revision}`."
    card = f"# Base model\n\n{origin} Iteration 0 of this run; also its reference model.\n"
    save_pretrained(model, tokenizer, work / "policy", card=card)
    save_optimizer(OptimizerState(steps={}, episode=0, first_moments={}, second_moments={}), work / "optimizer")
    inputs = {params.source: hash_path(Path(params.source))} if Path(params.source).is_dir() else {}
    for name in ("policy", "optimizer"):
        write_lineage(work / name, stage="base_model", inputs=inputs if name == "policy" else {})
        publish(work / name, CHECKPOINTS / name / "0")
    write_json(REWARD_STATE, FIRST_REWARD_STATE)


if __name__ == "__main__":
    run_stage("base_model", main)
