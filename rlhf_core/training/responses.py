"""What surrounds the PPO update: reading its responses, describing its checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlhf_core.artifacts.shards import iter_tables, ragged
from rlhf_core.config import PpoUpdateParams


@dataclass(frozen=True)
class Responses:
    """The responses that an iteration trains on, without those of no tokens. The last four only with a critic."""

    sample_ids: list[str]  # [B]
    prompt_ids: list[list[int]]  # [B]
    response_ids: list[list[int]]  # [B], each at least one token
    logprobs: list[np.ndarray]  # [B] of [T] float32, nats, what the ratio starts from: the trainer's or the sampler's
    ref_logprobs: list[np.ndarray]  # [B] of [T] float32, nats
    importance_weights: list[np.ndarray]  # [B] of [T] float32
    advantages: list[np.ndarray]  # [B] of [T] float32
    values: list[np.ndarray] | None = None  # [B] of [T] float32, before the update
    returns: list[np.ndarray] | None = None  # [B] of [T] float32
    bootstrap_value: list[float] | None = None  # [B], V after the last token, before the update
    bootstrap_return: list[float | None] | None = None  # [B]; None = nothing to learn after the last token

    def flat(self, name: str, rows: list[int], device: torch.device) -> Tensor:
        """Return one of the token-aligned fields of these rows as one flat tensor [N]."""
        column: list[np.ndarray] = getattr(self, name)
        return torch.from_numpy(np.concatenate([column[row] for row in rows])).to(device)

    def slots(self, rows: list[int]) -> list[int]:
        """Return the places in `rows` of the responses that have a return after their last token."""
        if self.bootstrap_return is None:
            return []
        return [place for place, row in enumerate(rows) if self.bootstrap_return[row] is not None]

    def after(self, name: str, rows: list[int], slots: list[int], device: torch.device) -> Tensor:
        """Return bootstrap_value or bootstrap_return of those of the rows, as one tensor."""
        column: list[float] = getattr(self, name)
        return torch.tensor([column[rows[place]] for place in slots], dtype=torch.float32, device=device)


def read_responses(
    directory: Path, *, iteration: str, old_logprobs: Literal["trainer", "sampler"], critic: bool
) -> tuple[Responses, int]:
    """Read data/advantages for training, and count the iteration's own responses, those of no tokens included.

    Args:
        directory: Shards of the advantages schema.
        iteration: Whose update this is; other iterations' responses are replayed ones.
        old_logprobs: Whose logprobs the ratio starts from.
        critic: Whether there are values and returns.
    """
    floats = {name: name for name in ("logprobs", "ref_logprobs", "importance_weights", "advantages")}
    if old_logprobs == "sampler":
        floats["logprobs"] = "sampler_logprobs"
    if critic:
        floats |= {"values": "values", "returns": "returns"}
    per_row = {"sample_ids": "sample_id", "prompt_ids": "prompt_ids", "response_ids": "response_ids"}
    if critic:
        per_row |= {"bootstrap_value": "bootstrap_value", "bootstrap_return": "bootstrap_return"}
    fields: dict[str, list[object]] = {name: [] for name in (*per_row, *floats)}
    own = 0
    for _, table in iter_tables(directory, [*per_row.values(), *floats.values()]):
        rows = {name: table[column].to_pylist() for name, column in per_row.items()}
        tokens = {name: ragged(table[column]) for name, column in floats.items()}
        own += sum(sample_id.startswith(f"{iteration}-") for sample_id in rows["sample_ids"])
        for row in range(table.num_rows):
            if not rows["response_ids"][row]:
                continue
            for name, column in rows.items():
                fields[name].append(column[row])
            for name, (flat, offsets) in tokens.items():
                fields[name].append(flat[offsets[row] : offsets[row + 1]])
    return Responses(**fields), own  # type: ignore[arg-type]


def policy_card(iteration: str, prev: str, inputs: dict[str, str], params: PpoUpdateParams, critic_only: bool) -> str:
    """Return the model card of a policy checkpoint: what it was trained from, on what, and how.

    Args:
        iteration: Of the checkpoint.
        prev: The iteration that it starts from.
        inputs: Hash of each input.
        params: Of the update.
        critic_only: In critic warm-up, where the policy stays as it is.
    """
    how = "Critic warm-up: the weights are those of" if critic_only else "PPO update of"
    lines = [
        f"# Policy of iteration {iteration}",
        "",
        f"{how} iteration {prev}'s policy. A plain Hugging Face checkpoint; critic and optimiser state stand",
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
