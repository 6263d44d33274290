"""The critic: a linear head on hidden states of the policy's trunk (shared) or of a backbone of its own (separate)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_core.errors import ModelError

_PROBE_TOKENS = 8  # enough for every layer's attention to have something to mix
_STATE_TOLERANCE = 1e-6  # of states near 1; equal inputs of one shape give equal bits, so this is generous


class Critic(nn.Module):
    """V of a state, from the hidden state there: V = head(h)."""

    def __init__(self, head: nn.Linear, backbone: PreTrainedModel | None = None) -> None:
        """Put together a critic.

        Args:
            head: Hidden state [H] -> value [1], float32, reward units.
            backbone: The separate critic's own causal model without its output embedding; None = the policy's trunk.
        """
        super().__init__()
        self.head = head
        self.backbone = backbone

    def values(self, hidden: Tensor) -> Tensor:
        """Return V [N] float32, reward units, of hidden states [N, H]."""
        values: Tensor = self.head(hidden.float()).squeeze(-1)
        return values


def reward_critic(classifier: PreTrainedModel, mean: float, std: float) -> Critic:
    """Return a separate critic whose value of a text is the reward model's normalised score of that text.

        V(h) = (w . h + b - mean) / std

    Args:
        classifier: A decoder with a linear `score` layer; its trunk becomes the backbone, not a copy.
        mean: Of its raw scores, from load_normalisation.
        std: Of its raw scores.

    Raises:
        ModelError: If it has no such layer, as encoders do not.
    """
    score: Any = getattr(classifier, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise ModelError(
            f"{type(classifier).__name__}: has no linear score layer over the states of its tokens, so it scores whole"
            " texts only; it cannot become a critic. Set critic.init to policy"
        )
    head = nn.Linear(score.in_features, 1, device=score.weight.device)
    bias = 0.0 if score.bias is None else float(score.bias)
    with torch.no_grad():
        head.weight.copy_(score.weight.float() / std)
        head.bias.fill_((bias - mean) / std)
    backbone: Any = classifier.base_model
    return Critic(head, backbone)


def check_causal(critic: Critic, where: Path) -> None:
    """Check, by a forward pass, that no state of a separate critic depends on tokens that come later.

    A value that has seen the rest of the response is no baseline: it would leak the outcome into every advantage.

    Args:
        critic: With a backbone.
        where: Its directory, for messages.

    Raises:
        ModelError: If it is bidirectional, or cannot be run as a decoder.
    """
    backbone = critic.backbone
    assert backbone is not None
    device = critic.head.weight.device
    ids = torch.arange(_PROBE_TOKENS, device=device)[None]
    changed = ids.clone()
    changed[0, -1] = 0
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    try:
        with torch.no_grad():
            first, second = (
                backbone(input_ids=row, position_ids=positions, use_cache=False).last_hidden_state.float()
                for row in (ids, changed)
            )
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{where}: {type(backbone).__name__} does not run as a decoder: {error}") from None
    if not torch.allclose(first[:, :-1], second[:, :-1], atol=_STATE_TOLERANCE, rtol=_STATE_TOLERANCE):
        raise ModelError(
            f"{where}: {type(backbone).__name__} is bidirectional: its state at a token depends on later tokens, so its"
            " values would know the rest of the response. A critic must be a causal model (a decoder)"
        )


def check_vocabulary(critic: Critic, where: Path, *, tokens: int) -> None:
    """Check that a separate critic has an embedding for every token id.

    Args:
        critic: With a backbone.
        where: Its directory, for messages.
        tokens: Of the tokenizer.

    Raises:
        ModelError: If it has fewer.
    """
    assert critic.backbone is not None
    embeddings: Any = critic.backbone.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    if rows < tokens:
        raise ModelError(f"{where}: the tokenizer has {tokens} tokens but the critic only {rows} embedding rows")
