"""Low-rank adapters (LoRA) on a model's linear layers, their way back into its weights, and from update to update.

Left out: the matrix products and the merge, which are the peft library's. It is imported only where adapters are asked
for: it takes seconds.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.checkpoint import OptimizerState

if TYPE_CHECKING:
    from peft import PeftModel

_SHOWN = 12  # names in an error
_ADAPTER = "default"  # peft's name of it
_PREFIX = "policy."  # of a policy's parameters in OptimizerState


def head_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of a classifier that lie above its layers: its head, and an encoder's pooler.

    A language model has neither, so they start at random: no adapter could make up for random weights below it.
    """
    backbone = {id(parameter) for parameter in model.base_model.parameters()}
    pooler = getattr(model.base_model, "pooler", None)
    above = {id(parameter) for parameter in pooler.parameters()} if isinstance(pooler, nn.Module) else set()
    return [p for p in model.parameters() if id(p) not in backbone or id(p) in above]


def add_adapters(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] | None,
    whole: Sequence[nn.Parameter],
    seed: int,
) -> "PeftModel":
    """Put adapters beside linear layers of a model, in place, and freeze everything else but `whole`.

        y = W x + alpha / rank * B A x,    A [rank, in] random, B [out, rank] zero

    so the model is the same as before until the first step. Layers whose weights are already frozen get none.

    Args:
        model: In eval mode.
        rank: Of B A.
        alpha: Scale, in units of rank.
        targets: Last parts of layers' names, such as q_proj; None = all linear layers below the head.
        whole: Parameters that learn by themselves, such as head_parameters.
        seed: Of A.

    Returns:
        What merge takes. The adapters are float32, whatever the model's dtype.

    Raises:
        ConfigError: If a target names no layer that learns, or there is none.

    Source: Hu et al. 2022, LoRA: low-rank adaptation of large language models, section 4.1.
    """
    from peft import LoraConfig, get_peft_model

    linear = _linear_layers(model)
    found = [name for name in linear if targets is None or name.split(".")[-1] in targets]
    ends = {name.split(".")[-1] for name in linear}
    unknown = sorted(set(targets or ()) - ends)
    if unknown or not found:
        raise ConfigError(
            f"lora_targets is {list(targets or ())}, but {', '.join(unknown) or 'none'} is no linear layer that learns;"
            f" {type(model).__name__} has {', '.join(sorted(ends)[:_SHOWN]) or 'none'} (above frozen_layers)"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft divides it by r: a float will do
        target_modules=found,
        fan_in_fan_out=any(isinstance(linear[name], Conv1D) for name in found),
    )
    torch.manual_seed(seed)
    adapted: Any = get_peft_model(model, config)
    adapted.eval()
    for parameter in whole:
        parameter.requires_grad_(True)
    return adapted


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers of the backbone that learn, by name, without a pooler."""
    above = {id(parameter) for parameter in head_parameters(model)}
    backbone = {id(module) for module in model.base_model.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and id(module) in backbone
        and module.weight.requires_grad
        and id(module.weight) not in above
    }


def merge(adapted: "PeftModel") -> None:
    """Add the adapters to the weights, in place, and take them out: the model is plain again.

        W <- W + alpha / rank * B A, in float32, rounded once to the dtype of W

    Args:
        adapted: From add_adapters.
    """
    adapted.merge_and_unload()


def policy_adapters(
    policy: PreTrainedModel,
    state: OptimizerState,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str] | None,
    seed: int,
) -> "PeftModel | None":
    """Put adapters into a policy, those of the previous update where there was one, without changing what it computes.

        y = W x + alpha / rank * (B A - B_0 A_0) x

    W, the published policy's, holds the stored B_0 A_0 already, so these are taken back: A and B start at A_0 and B_0.

    Args:
        policy: As published.
        state: With the stored adapters.
        rank: See add_adapters; 0 = none, and None is returned.
        alpha: See add_adapters.
        targets: See add_adapters.
        seed: Of the first adapters of a chain.

    Raises:
        ConfigError: See add_adapters.
        ModelError: If the policy was trained before, but with other adapters or without any.
    """
    if rank == 0:
        return None
    adapted = add_adapters(policy, rank=rank, alpha=alpha, targets=targets, whole=(), seed=seed)
    if state.steps.get("policy"):
        _go_on(policy, adapted, {name.removeprefix(_PREFIX): tensor for name, tensor in state.adapters.items()})
    return adapted


class _Since(nn.Module):
    """One of the two matrices of an adapter, beside where it started: together they give B A x - B_0 A_0 x.

        first:  x -> (A x, A_0 x)
        second: (h, h_0) -> B h - B_0 h_0

    The difference is taken inside one product, whose sums are float32, before anything is rounded or added to W x.
    """

    def __init__(self, weight: nn.Parameter, start: Tensor, *, first: bool) -> None:
        """Begin at `start`; `weight` becomes the matrix that learns."""
        super().__init__()
        self.weight, self.first = weight, first
        weight.data.copy_(start)
        self.register_buffer("start", weight.detach().clone())

    def forward(self, states: Tensor) -> Tensor:
        """Return the product, [..., 2 rank] for the first matrix and [..., out] for the second."""
        start: Any = self.start
        pair = torch.cat([self.weight, start]) if self.first else torch.cat([self.weight, -start], dim=1)
        return nn.functional.linear(states, pair)


def _go_on(policy: PreTrainedModel, adapted: "PeftModel", stored: Mapping[str, Tensor]) -> None:
    """Set the adapters to the stored ones, and take what these do back from what the layers return."""
    named = {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}
    if {name: tensor.shape for name, tensor in stored.items()} != {name: p.shape for name, p in named.items()}:
        raise ModelError(
            f"the policy was trained with {len(stored)} adapter matrices, but now there are {len(named)} for"
            " ppo_update.lora_rank and lora_targets, or of another rank: these may not change within a chain"
        )
    for place, layer in _adapted_layers(adapted).items():
        for letter, matrices in (("A", layer.lora_A), ("B", layer.lora_B)):
            start = stored[f"{place}.lora_{letter}.{_ADAPTER}.weight"]
            matrices[_ADAPTER] = _Since(matrices[_ADAPTER].weight, start, first=letter == "A")


def _adapted_layers(adapted: "PeftModel") -> dict[str, Any]:
    """The layers with adapters, by name."""
    from peft.tuners.lora import LoraLayer

    modules = adapted.get_base_model().named_modules()
    return {name: module for name, module in modules if isinstance(module, LoraLayer)}


def adapters_among(named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return those of some named parameters that belong to adapters."""
    return {name: parameter.detach() for name, parameter in named if ".lora_" in name}


def merged(adapted: "PeftModel", plain: PreTrainedModel) -> PreTrainedModel:
    """Add what the adapters have learnt to the weights that they were put beside, in float32, and return the model.

    The policy's own copy of the weights may be rounded; the published weights never are.

    Args:
        adapted: From policy_adapters.
        plain: The policy as it was published before, float32, on the CPU; changed in place.
    """
    for place, layer in _adapted_layers(adapted).items():
        change = layer.get_delta_weight(_ADAPTER).detach()
        matrices = layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]
        if isinstance(matrices[0], _Since):
            taken_back = matrices[1].start @ matrices[0].start * layer.scaling[_ADAPTER]
            change = change - (taken_back.T if layer.fan_in_fan_out else taken_back)
        weight: Any = plain.get_submodule(place).weight
        weight.data += change.to(weight.device)
    return plain
