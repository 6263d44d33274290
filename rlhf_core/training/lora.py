"""Low-rank adapters (LoRA) on a model's linear layers, and their way back into its weights.

Left out: the matrix products and the merge, which are the peft library's. It is imported only where adapters are asked
for: it takes seconds.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel

_SHOWN = 12  # names in an error


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
        lora_alpha=alpha,
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
