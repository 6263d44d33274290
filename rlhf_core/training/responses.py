"""What surrounds the PPO update: reading its responses, measuring its critic, describing its checkpoint."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.algorithms.statistics import explained_variance
from rlhf_core.artifacts.shards import iter_tables, ragged
from rlhf_core.config import PpoUpdateParams
from rlhf_core.models.batching import Batch
from rlhf_core.models.forward import for_all_rows
from rlhf_core.training.ppo import Responses, Settings, outputs_and_values

_FLOATS = ("logprobs", "values", "advantages", "returns")


def read_responses(directory: Path) -> tuple[Responses, int]:
    """Read data/advantages for training, and count the responses of no tokens, which are left out.

    Args:
        directory: Shards of the advantages schema.
    """
    responses, empty = Responses([], [], [], [], [], [], []), 0
    for _, table in iter_tables(directory, ["sample_id", "prompt_ids", "response_ids", *_FLOATS]):
        columns = {name: ragged(table[name]) for name in _FLOATS}
        ids = table.select(["sample_id", "prompt_ids", "response_ids"]).to_pydict()
        for row in range(table.num_rows):
            if not ids["response_ids"][row]:
                empty += 1
                continue
            for name, values in ids.items():
                getattr(responses, f"{name}s" if name == "sample_id" else name).append(values[row])
            for name, (flat, offsets) in columns.items():
                getattr(responses, name).append(flat[offsets[row] : offsets[row + 1]])
    return responses, empty


def explained_variance_after(
    policy: PreTrainedModel, value_head: nn.Linear, responses: Responses, settings: Settings
) -> float:
    """Return the explained variance of the returns by the updated critic, on the responses it was trained on."""

    def compute(batch: Batch) -> list[Tensor]:
        return list(outputs_and_values(policy, value_head, batch, settings)[1].split(batch.lengths))

    values = for_all_rows(
        compute,
        responses.prompt_ids,
        responses.response_ids,
        max_batch_tokens=settings.max_batch_tokens,
        pad_id=settings.pad_id,
        device=value_head.weight.device,
        progress=lambda rows: None,
    )
    return explained_variance(torch.cat(values).numpy(), np.concatenate(responses.returns))


def policy_card(iteration: str, prev: str, inputs: dict[str, str], params: PpoUpdateParams) -> str:
    """Return the model card of a policy checkpoint: what it was trained from, on what, and how."""
    lines = [
        f"# Policy of iteration {iteration}",
        "",
        f"PPO update of iteration {prev}'s policy. A plain Hugging Face checkpoint; value head and"
        f" optimiser state stand",
        f"beside it in `critic/{iteration}` and `optimizer/{iteration}`.",
        "",
        "| made from | SHA-256 |",
        "|---|---|",
        *(f"| {name} | `{digest}` |" for name, digest in sorted(inputs.items())),
        "",
        "| parameter | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in params.model_dump().items()),
        "",
    ]
    return "\n".join(lines)
