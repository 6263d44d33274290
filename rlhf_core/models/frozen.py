"""Models that only score, under bf16-autocast: their linear layers' weights are rounded once, not in every batch."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_core.models.forward import states_of_probe
from rlhf_core.models.memory import give_back_freed_memory
from rlhf_core.models.packing import packable


def round_weights(model: PreTrainedModel, precision: str) -> None:
    """Hold the weights of a model's linear layers in bfloat16, where its states stay the same bit by bit.

    Autocast rounds them anyway, in every pass anew; so this takes half of their memory and a twentieth of the time of
    the demo's passes. Whether something else reads them in float32 is found out by running the model once before and
    once after. Heads (output embedding, score layer) stay exact: they multiply in float32.

    Args:
        model: Not trained any more. Changed in place.
        precision: compute.precision; with another one than bf16-autocast nothing is done.
    """
    if precision != "bf16-autocast":
        return
    base: Any = model.base_model
    packable(base)  # it runs the model without autocast, and remembers the answer
    layers = [module for module in base.modules() if type(module) is nn.Linear]
    exact = [layer.weight.data for layer in layers]
    before = states_of_probe(base, precision)
    for layer in layers:
        layer.weight.data = layer.weight.data.to(torch.bfloat16)
    after = states_of_probe(base, precision)
    same = before is not None and after is not None and torch.equal(before, after)
    if not same:
        for layer, weight in zip(layers, exact, strict=True):
            layer.weight.data = weight
    exact.clear()
    give_back_freed_memory()  # many small pieces, of which none has room for an embedding
    if same:
        _leave_file(model)
    give_back_freed_memory()


def _leave_file(model: PreTrainedModel) -> None:
    """Copy what still lies in a mapped checkpoint file, so that the process holds nothing of the file any more.

    As long as one tensor does, the pages of all that were read count as the process's memory. Rounded weights (the
    bfloat16 ones) do not.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
            tensor.data = tensor.data.clone()
