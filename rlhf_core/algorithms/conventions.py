"""What PPO projects do differently behind equal names, as four records: ours, TRL, verl and OpenRLHF.

Only details that no parameter of params.yaml names are here. What the projects choose as defaults (a clip range, an
estimator) is a parameter, and the records leave it alone. Read on 2026-11-30, in

    TRL        huggingface/trl 1.12.0, trl/experimental/ppo/ppo_trainer.py (masked_whiten, steps 4 to 6 of train,
               vf_loss); trl/trainer/grpo_trainer.py for GRPO's epsilon
    verl       verl-project/verl, verl/trainer/ppo/core_algos.py (kl_penalty, compute_grpo_outcome_advantage,
               compute_value_loss) and verl/utils/torch_functional.py (masked_whiten)
    OpenRLHF   OpenRLHF/OpenRLHF, openrlhf/models/utils.py (compute_approx_kl, compute_reward), openrlhf/models/loss.py
               (ValueLoss) and openrlhf/trainer/ppo_utils/experience_maker.py (advantage normalisation, group_norm)
"""

from dataclasses import dataclass
from typing import Literal

from rlhf_core.algorithms.kl import LOG_RATIO_CAP

KlEstimator = Literal["k1", "k2", "k3", "absolute", "full"]
Variance = Literal["population", "bessel"]
EpsilonPlace = Literal["added", "floor"]


@dataclass(frozen=True)
class Conventions:
    """The details of one project. See docs/algorithms.md for the table.

    Attributes:
        score_slot: Whether the score of a response shorter than max_new_tokens is paid one slot after its last token:
            there V is bootstrap_value, the KL is 0, and no policy term exists. Otherwise, and for a response that fills
            max_new_tokens, the score lands on the last token and V after it is 0.
        whitening_variance: population divides by n, bessel by n - 1. advantages.whitening_variance overrules it.
        whitening_epsilon: Whether 1e-8 is added to the variance, or is the least that the variance may be.
        log_ratio_bound: Nats, of -d inside the exponential of k3; None = none.
        estimate_bound: Nats, of an estimate's absolute value; None = none.
        bounded_estimators: The estimators that estimate_bound is applied to.
        value_loss_factor: Of the squared error.
        grpo_epsilon: Added to a group's standard deviation, in the unit of the score.
    """

    score_slot: bool
    whitening_variance: Variance
    whitening_epsilon: EpsilonPlace
    log_ratio_bound: float | None
    estimate_bound: float | None
    bounded_estimators: tuple[KlEstimator, ...]
    value_loss_factor: float
    grpo_epsilon: float

    def kl_bound(self, estimator: KlEstimator) -> float | None:
        """Return estimate_bound where it applies to the estimator, else None."""
        return self.estimate_bound if estimator in self.bounded_estimators else None


CONVENTIONS = {
    # Population variance and the bound on d in k3 alone: see whitening.py and kl.py.
    "ours": Conventions(
        score_slot=False,
        whitening_variance="population",
        whitening_epsilon="added",
        log_ratio_bound=LOG_RATIO_CAP,
        estimate_bound=None,
        bounded_estimators=(),
        value_loss_factor=0.5,
        grpo_epsilon=1e-4,
    ),
    "trl": Conventions(
        score_slot=True,
        whitening_variance="bessel",
        whitening_epsilon="added",
        log_ratio_bound=None,
        estimate_bound=None,
        bounded_estimators=(),
        value_loss_factor=0.5,
        grpo_epsilon=1e-4,
    ),
    "verl": Conventions(
        score_slot=False,
        whitening_variance="bessel",
        whitening_epsilon="added",
        log_ratio_bound=20.0,
        estimate_bound=10.0,
        bounded_estimators=("k3",),
        value_loss_factor=0.5,
        grpo_epsilon=1e-6,
    ),
    "openrlhf": Conventions(
        score_slot=False,
        whitening_variance="population",
        whitening_epsilon="floor",
        log_ratio_bound=None,
        estimate_bound=10.0,
        bounded_estimators=("k1", "k2", "k3"),
        value_loss_factor=0.5,
        grpo_epsilon=1e-9,
    ),
}
