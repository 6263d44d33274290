"""Updates by tests/ppo_case.py, one a case, as one of several processes: run under torchrun by a test."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from rlhf_core.training.distributed import Processes, join
from rlhf_core.training.lora import policy_adapters
from tests.ppo_case import CPU, NO_STATE, run, scored, separate_critic, settings
from tests.tiny import tiny_model

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
CASES = (*AGGREGATIONS, "adapters")


def updated(case: str, processes: Processes) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Two epochs over four responses in minibatches of 3 and 1; the log, and all weights and moments after it.

    In the minibatch of 1, the second of two processes has no row. AdamW's eps is large so that its steps follow the
    gradient: with a small one, a first step goes by the sign, and for gradients near 0 that is rounding.
    """
    model, critic = tiny_model().eval(), separate_critic()
    responses = scored(model, critic)
    if case == "adapters":
        policy_adapters(model, NO_STATE, rank=2, alpha=4.0, targets=None, seed=0)
    options: dict[str, Any] = {"kl_loss_coef": 0.1, "max_batch_tokens": 16}
    options["aggregation"] = case if case in AGGREGATIONS else "token_mean"
    chosen = settings(ppo_epochs=2, minibatch_size=3, **options)
    log, state = run(model, critic, responses, chosen, processes=processes, learning_rate=1e-4, adam_eps=1e-3)
    tensors = {f"policy.{name}": p for name, p in model.named_parameters()}
    tensors |= {f"critic.{name}": p for name, p in critic.named_parameters()}
    tensors |= {f"first.{name}": moment for name, moment in state.first_moments.items()}
    tensors |= {f"second.{name}": moment for name, moment in state.second_moments.items()}
    return log, {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def main(directory: Path) -> None:
    """Write what this process ended with."""
    torch.set_num_threads(1)
    processes, _ = join(CPU)
    for case in CASES:
        log, tensors = updated(case, processes)
        save_file(tensors, directory / f"{case}-{processes.rank}.safetensors")
        (directory / f"{case}-{processes.rank}.json").write_text(json.dumps(log))
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
