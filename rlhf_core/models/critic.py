"""The critic: a linear head over hidden states, of the policy's trunk (shared) or of a backbone of its own (separate)."""

from torch import Tensor, nn
from transformers import PreTrainedModel


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
