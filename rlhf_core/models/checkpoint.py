"""What stands beside a policy's Hugging Face directory: the critic and the optimiser's state.

Everything is safetensors and JSON, so nothing can run code when it is loaded.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.artifacts.lineage import check_directory, check_safetensors
from rlhf_core.errors import ModelError
from rlhf_core.models.critic import Critic
from rlhf_core.models.loading import first_line, load_backbone, read_json, saving, tensor_bytes
from rlhf_core.stage import write_json

_HEAD = "value_head.safetensors"
_CRITIC = "critic.json"
_BACKBONE = "backbone"
_OPTIMIZER = "optimizer.json"
_MOMENTS = "moments.safetensors"
_ADAPTERS = "adapters.safetensors"
_NORMALISATION = "score_normalisation.json"
MEASURED_SCORES = "measured_scores.json"  # of a reward model: pair_id -> raw scores that train_rm measured it by


def new_value_head(hidden_size: int) -> nn.Linear:
    """Return a value head that predicts 0 for every state: hidden state [H] -> value [1], float32."""
    head = nn.Linear(hidden_size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def save_critic(critic: Critic | None, directory: Path) -> None:
    """Write a critic: its head, its backbone where it has one, and critic.json, which tells its kind; None = none.

    Args:
        critic: A separate one's backbone becomes a plain Hugging Face directory, in the dtype it is held in.
        directory: Created; it holds critic.json, value_head.safetensors and backbone/, as far as the kind has them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if critic is None:
        write_json(directory / _CRITIC, {"kind": "none"})
        return
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in critic.head.state_dict().items()}
    with saving(directory, tensor_bytes(critic.parameters())):
        save_file(tensors, directory / _HEAD)
        if critic.backbone is not None:
            critic.backbone.save_pretrained(directory / _BACKBONE)
    kind = "shared" if critic.backbone is None else "separate"
    write_json(directory / _CRITIC, {"kind": kind, "hidden_size": critic.head.in_features})


def critic_kind(directory: Path) -> str:
    """Return shared, separate or none: what save_critic wrote here.

    Raises:
        ModelError: If critic.json is missing or says something else.
    """
    content = read_json(directory / _CRITIC)
    kind = content.get("kind") if isinstance(content, dict) else content
    if kind not in ("shared", "separate", "none"):
        raise ModelError(f"{directory / _CRITIC}: kind is {kind!r}; expected shared, separate or none")
    return str(kind)


def load_critic(
    directory: Path, *, policy: PreTrainedModel | None, device: torch.device, precision: str
) -> Critic | None:
    """Load a critic; None where critic.kind is none.

    Args:
        directory: Written by save_critic.
        policy: Whose trunk a shared critic reads; a separate one needs none.
        device: Where it goes.
        precision: compute.precision, of a separate backbone. The head is float32 always.

    Raises:
        ModelError: If weights are missing, or the head was trained for another hidden size.
    """
    kind = critic_kind(directory)
    if kind == "none":
        return None
    check_directory(directory)
    if kind == "separate":
        backbone = load_backbone(directory / _BACKBONE, device=device, precision=precision)
        return Critic(_load_head(directory, backbone, "its backbone"), backbone).to(device)
    if policy is None:
        raise ModelError(f"{directory}: a shared critic reads the policy's hidden states; it cannot be run by itself")
    return Critic(_load_head(directory, policy, "the policy")).to(device)


def _load_head(directory: Path, trunk: PreTrainedModel, name: str) -> nn.Linear:
    """Read the value head and check that it fits the trunk whose states it reads."""
    described, found = read_json(directory / _CRITIC).get("hidden_size"), trunk.config.get_text_config().hidden_size
    if described != found:
        raise ModelError(f"{directory}: value head for hidden size {described}, but {name} has {found}")
    head = nn.Linear(found, 1)
    weights = _read_tensors(directory / _HEAD)
    missing = sorted({"weight", "bias"} - weights.keys())
    if missing:
        raise ModelError(f"{directory / _HEAD}: lacks {', '.join(missing)}; the value head would be left random")
    head.load_state_dict(weights)
    return head


@dataclass(frozen=True)
class OptimizerState:
    """AdamW's state between iterations, by parameter name.

    A part is what a parameter's name begins with: policy, value_head, or critic (a separate critic's backbone). A part
    that was not trained yet has no steps and no moments; one that stands still, as the policy does in critic warm-up,
    keeps both.
    """

    steps: dict[str, int]  # optimiser steps since the base model, by part
    episode: int  # responses trained on since the base model, each counted once per iteration
    first_moments: dict[str, Tensor]  # exp_avg; of the parts with steps
    second_moments: dict[str, Tensor]  # exp_avg_sq
    adapters: dict[str, Tensor] = field(
        default_factory=dict
    )  # the policy's weights hold them already; none without LoRA


def save_optimizer(state: OptimizerState, directory: Path) -> None:
    """Write the optimiser state; the moments in the dtype they are held in, the adapters where there are any."""
    directory.mkdir(parents=True, exist_ok=True)
    moments = {f"exp_avg/{name}": tensor for name, tensor in state.first_moments.items()}
    moments |= {f"exp_avg_sq/{name}": tensor for name, tensor in state.second_moments.items()}
    for file, tensors in ((_MOMENTS, moments), (_ADAPTERS, state.adapters)):
        if tensors or file == _MOMENTS:
            with saving(directory / file, tensor_bytes(tensors.values())):
                save_file(
                    {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, directory / file
                )
    write_json(directory / _OPTIMIZER, {"kind": "adamw", "steps": state.steps, "episode": state.episode})


def load_optimizer(directory: Path) -> OptimizerState:
    """Read the optimiser state written by save_optimizer.

    Raises:
        ModelError: If a file is missing or broken.
    """
    check_directory(directory)
    description = read_json(directory / _OPTIMIZER)
    moments = _read_tensors(directory / _MOMENTS)
    try:
        steps, episode = {part: int(step) for part, step in description["steps"].items()}, int(description["episode"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{directory / _OPTIMIZER}: expected steps by part, and episode: {error!r}") from None
    return OptimizerState(
        steps=steps,
        episode=episode,
        first_moments={n.removeprefix("exp_avg/"): t for n, t in moments.items() if n.startswith("exp_avg/")},
        second_moments={n.removeprefix("exp_avg_sq/"): t for n, t in moments.items() if n.startswith("exp_avg_sq/")},
        adapters=_read_tensors(directory / _ADAPTERS) if (directory / _ADAPTERS).exists() else {},
    )


def save_normalisation(directory: Path, *, mean: float, std: float, measured_on: str) -> None:
    """Write what a reward model's raw scores are normalised by: score = (raw - mean) / std.

    Bradley-Terry leaves the scores' origin free. A critic that starts at 0 would take many iterations to learn an
    offset, and meanwhile the offset would favour late tokens over early ones in every response.

    Args:
        directory: Of the reward model.
        mean: Of the raw scores.
        std: Of the raw scores; 0 (all equal) is stored as 1.
        measured_on: What the two were measured on, for people.
    """
    content = {"mean": mean, "std": std if std > 0 else 1.0, "measured_on": measured_on}
    write_json(directory / _NORMALISATION, content)


def load_normalisation(directory: Path) -> tuple[float, float]:
    """Return (mean, std) of a reward model's raw scores.

    Raises:
        ModelError: If the file is missing: the directory was not written by train_rm.
    """
    content = read_json(directory / _NORMALISATION)
    try:
        return float(content["mean"]), float(content["std"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{directory / _NORMALISATION}: expected the numbers mean and std: {error!r}") from None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    check_safetensors(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: expected a safetensors file: {first_line(error)}") from None
