"""Rewards, advantages, returns and importance weights, appended to data/scores: `stages.advantages ITERATION PREV`.

All shards are computed as one flat array (about 200 bytes a token), so that no number depends on how the rows were cut
into shards. Needs no model. What reward shaping carries from iteration to iteration is read from
data/reward_state/PREV.json and written to data/reward_state/ITERATION.json.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_core.algorithms.conventions import CONVENTIONS, Conventions
from rlhf_core.algorithms.estimates import Estimates, estimate
from rlhf_core.algorithms.off_policy import importance_weights
from rlhf_core.algorithms.ragged import PerToken
from rlhf_core.algorithms.responses import Responses
from rlhf_core.algorithms.reward_state import Moments, RewardState
from rlhf_core.algorithms.shaping import next_kl_coef, objective_metrics, shaped_rewards, shaped_scores, token_kl
from rlhf_core.artifacts.columns import read_responses, with_estimates
from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import advantages_schema
from rlhf_core.artifacts.shards import iter_tables, read_metadata, write_shard
from rlhf_core.config import AdvantageParams, load_run
from rlhf_core.errors import ArtifactError, StaleInput
from rlhf_core.stage import publish, run_stage, work_directory, write_json

STATES = Path("data/reward_state")
SCORE = (
    "score_scaling",
    "score_clip",
    "missing_eos_penalty",
    "missing_eos_mode",
    "overlong_buffer",
    "overlong_penalty",
)
ESTIMATE = ("estimator", "gamma", "gae_lambda", "value_gae_lambda", "whiten_rewards", "whiten_advantages")
CORRECTION = ("correction", "correction_min", "correction_max")


def main() -> None:
    """Compute over all shards of data/scores, then write each of them again with its new columns."""
    iteration, prev = sys.argv[1:3]
    params = load_run().at(iteration)
    source, before = Path(f"data/scores/iteration={iteration}"), STATES / f"{prev}.json"
    metadata = read_metadata(source)
    if metadata["iteration"] != iteration:
        raise StaleInput(f"{source}: holds iteration {metadata['iteration']}; run `dvc repro -f score@{iteration}`")
    state, responses = read_state(before), read_responses(source, iteration)
    metadata |= {
        "stage": "advantages",
        "inputs": {**metadata["inputs"], str(source): hash_path(source), str(before): hash_path(before)},
        "conventions": params.conventions,
        "advantages": params.advantages.model_dump(),
    }
    found, weights, state, metrics = compute(
        responses,
        state,
        params.advantages,
        conventions=CONVENTIONS[params.conventions],
        max_new_tokens=metadata["sampling"]["max_new_tokens"],
    )
    work = work_directory(f"advantages@{iteration}", metadata)
    row = 0
    for name, table in iter_tables(source):
        whole = with_estimates(table, row, responses.offsets, found, weights)
        write_shard(work / name, whole, advantages_schema(table.schema), metadata)
        row += table.num_rows
    publish(work, Path(f"data/advantages/iteration={iteration}"))
    write_json(STATES / f"{iteration}.json", asdict(state))
    write_json(Path(f"data/metrics/advantages/{iteration}.json"), metrics)


def compute(
    responses: Responses,
    state: RewardState,
    params: AdvantageParams,
    *,
    conventions: Conventions,
    max_new_tokens: int,
) -> tuple[Estimates, PerToken, RewardState, dict[str, int | float]]:
    """Return estimates, importance weights, the next reward state, and metrics, for all responses of an iteration."""
    given = params.model_dump()

    def chosen(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: given[name] for name in names}

    scores, moments = shaped_scores(responses, state.scores, max_new_tokens=max_new_tokens, **chosen(SCORE))
    kl = token_kl(responses, kl_estimator=params.kl_estimator, conventions=conventions)
    kl_coef, next_coef = params.kl_coef, state.kl_coef
    if params.kl_controller == "adaptive":
        kl_coef = params.kl_coef if state.kl_coef is None else state.kl_coef
        next_coef = next_kl_coef(responses, kl_coef, kl_target=params.kl_target, kl_horizon=params.kl_horizon)
    slotted = shaped_rewards(
        responses, scores, kl, kl_coef=kl_coef, max_new_tokens=max_new_tokens, conventions=conventions
    )
    found = estimate(
        responses,
        *slotted,
        **chosen(ESTIMATE),
        whitening_variance=params.whitening_variance,
        conventions=conventions,
    )
    weights, cut = importance_weights(
        responses.sampler_logprobs, responses.logprobs, responses.offsets, **chosen(CORRECTION)
    )
    metrics = objective_metrics(responses, scores, kl, kl_coef=kl_coef) | found.metrics | cut
    return found, weights, RewardState(kl_coef=next_coef, scores=moments), metrics


def read_state(path: Path) -> RewardState:
    """Read what the previous iteration's reward shaping left.

    Raises:
        ArtifactError: If the file is missing or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return RewardState(kl_coef=found["kl_coef"], scores=Moments(**found["scores"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path}: not a reward state ({error}); run `dvc repro` for the stage that writes it"
        ) from None


if __name__ == "__main__":
    run_stage("advantages@" + sys.argv[1], main)
