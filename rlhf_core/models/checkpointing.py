"""Gradient checkpointing: a layer's activations are made again in the backward pass instead of being kept.

Left out: the mechanism, which is torch's and transformers' own.
"""

from typing import Any, Literal

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.packing import same_rows_again

GradientCheckpointing = Literal["none", "recompute", "offload"]


def checkpoint_layers(model: PreTrainedModel, how: GradientCheckpointing) -> None:
    """Let a model's layers keep their inputs alone for the backward pass, and go through a second forward pass there.

    Gradients are the same bit by bit. The model stays in eval mode: only the layers themselves, none of the modules
    within them, are marked as in training, which is what transformers asks for.

    Args:
        model: About to be trained; on its device.
        how: compute.gradient_checkpointing. none: nothing is done. offload: inputs of layers wait in host memory.

    Raises:
        ConfigError: For offload without a GPU.
        ModelError: If the architecture does not have it.
    """
    if how == "none":
        return
    if how == "offload" and model.device.type == "cpu":
        raise ConfigError(
            "compute.gradient_checkpointing is offload, which moves activations from a GPU to host memory, but the"
            " model is on the CPU; set it to recompute or none"
        )
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": same_rows_again}
    try:
        model.gradient_checkpointing_enable(options, offload=how == "offload")
    except ValueError as error:
        raise ModelError(f"compute.gradient_checkpointing is {how}: {error}; set it to none") from None
    model.disable_input_require_grads()  # for torch's other mechanism; it would make frozen embeddings learn
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
