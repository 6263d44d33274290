"""params.yaml and iterations.yaml as typed, frozen objects: the only reader of both files.

No field has a default: DVC sees only the files, so a default here would be invisible to dvc.lock and to
`dvc params diff`. All problems of both files are reported at once.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.environment import multiplies_in_bfloat16
from rlhf_core.errors import ConfigError
from rlhf_core.explain import explain
from rlhf_core.ranges import (
    Betas,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Probability,
    Section,
    Text,
)
from rlhf_core.reward_config import RewardModelSource, RewardsParams

Model = TypeVar("Model", bound=BaseModel)

ITERATION_SECTIONS = ("rollout", "score", "advantages", "ppo_update")
BASE_ITERATION = "0"
LoraTargets = Annotated[list[Text], Field(min_length=1)]
NEED_PAIRS = ("margin_coef", "label_smoothing", "soft_labels")
NEED_CRITIC = ("gae", "reward_minus_value")
NEED_GROUPS = ("rloo", "grpo", "dr_grpo", "reinforce_plus_plus_baseline")


class ComputeParams(Section):
    """How models are run outside vLLM."""

    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "float32", "bf16-autocast", "bfloat16"]
    max_batch_tokens: Count
    logits_chunk_tokens: Count
    gradient_checkpointing: Literal["none", "selective", "recompute", "offload"]
    torch_compile: bool
    processes: Count

    @field_validator("precision")
    @classmethod
    def _as_it_runs(cls, value: str, info: ValidationInfo) -> str:
        """Name what auto is on this machine: artifacts say what they were made in, and all code sees only that."""
        if value != "auto":
            return value
        return "bf16-autocast" if multiplies_in_bfloat16(info.data.get("device", "auto")) else "float32"


TRAINING_ONLY = {"gradient_checkpointing", "torch_compile", "processes"}  # of compute


class SamplingParams(Section):
    """How vLLM samples."""

    temperature: Annotated[float, Field(ge=0.01, le=10, allow_inf_nan=False)]
    max_new_tokens: Count
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    max_model_len: Annotated[int, Field(ge=2)]
    kv_cache_gib: Positive
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    tensor_parallel_size: Count
    nonfinite_logprobs: Literal["error", "drop"]

    @field_validator("dtype")
    @classmethod
    def _as_it_runs(cls, value: str) -> str:
        """Name what auto is on this machine, as compute.precision does; vLLM takes the GPU where there is one."""
        if value != "auto":
            return value
        return "bfloat16" if multiplies_in_bfloat16("auto") else "float32"


class BaseModelParams(Section):
    """Which pretrained model the run starts from."""

    source: Text
    revision: str | None
    trust_remote_code: bool

    @model_validator(mode="after")
    def _pinned_code(self) -> "BaseModelParams":
        if self.trust_remote_code and not self.revision:
            raise ValueError(
                "trust_remote_code: true runs code from the model repository; set revision to a commit you have read"
            )
        return self


class IngestParams(Section):
    """Where prompts and preferences come from, and what happens to rows that do not fit."""

    prompts: Text
    prompt_key: Text
    prompt_template: Text | None
    ground_truth_key: Text
    preferences: Text | None
    fraction: Annotated[float, Field(gt=0, le=1)]
    eval_fraction: Annotated[float, Field(gt=0, lt=1)]
    max_prompt_tokens: Count
    too_long: Literal["error", "drop", "truncate_left"]
    max_pair_tokens: Annotated[int, Field(ge=2)]
    special_tokens_in_text: Literal["escape", "drop", "error"]

    @model_validator(mode="after")
    def _sources(self) -> "IngestParams":
        for key in ("prompts", "preferences"):
            source = getattr(self, key)
            if source is None or source.startswith("hub:"):
                continue
            parts = Path(source).parts
            if parts[:2] != ("data", "raw") or ".." in parts or len(parts) < 3:
                raise ValueError(
                    f"{key} is {source!r}: expected a file under data/raw (so that DVC sees it change)"
                    f" or hub:<owner>/<name>"
                )
        return self

    @model_validator(mode="after")
    def _prompts_as_they_are_read(self) -> "IngestParams":
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template is {self.prompt_template!r}, which has no {{prompt}}: all prompts would be the same"
            )
        if self.prompt_key == self.ground_truth_key:
            raise ValueError(
                f"prompt_key and ground_truth_key are both {self.prompt_key!r}: the prompt would be its own answer"
            )
        return self


class TrainRmParams(Section):
    """Reward model training."""

    model: Text
    learning_rate: Positive
    weight_decay: NonNegative
    warmup_fraction: Probability
    epochs: Count
    batch_size: Count
    frozen_layers: CountOrZero
    lora_rank: CountOrZero
    lora_alpha: Positive
    lora_targets: LoraTargets | None
    loss: Literal["pairs", "plackett_luce"]
    ties: Literal["drop", "half"]
    margin_coef: NonNegative
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)]
    soft_labels: bool
    centring_coef: NonNegative
    checkpoint: Literal["best", "last"]
    max_grad_norm: Positive
    max_skipped_steps: CountOrZero
    adam_betas: Betas
    adam_eps: Positive
    save_every: CountOrZero

    @model_validator(mode="after")
    def _options_of_pairs(self) -> "TrainRmParams":
        if self.loss == "pairs":
            return self
        found = [f"{name}: {getattr(self, name)}" for name in NEED_PAIRS if getattr(self, name)]
        found += ["ties: half"] if self.ties == "half" else []
        if found:
            raise ValueError(
                f"loss: {self.loss} takes no {', '.join(found)}, which are about two responses; set loss to pairs, or"
                " margin_coef and label_smoothing to 0.0, soft_labels to false and ties to drop"
            )
        return self


class RolloutParams(Section):
    """How many responses an iteration samples."""

    prompts_per_iteration: CountOrZero
    samples_per_prompt: Count
    shard_prompts: Count


class CriticParams(Section):
    """Which critic the run trains, and what it starts from."""

    kind: Literal["shared", "separate", "none"]
    init: Text

    @model_validator(mode="after")
    def _shared_starts_from_the_policy(self) -> "CriticParams":
        if self.kind != "separate" and self.init != "policy":
            raise ValueError(
                f"init is {self.init!r}, but a critic of kind {self.kind} has no backbone of its own to initialise:"
                " set init to policy, or kind to separate"
            )
        return self


class ScoreParams(Section):
    """Replayed iterations, the gate on the sampler-trainer mismatch, and scores that are no number."""

    replay: list[Count]
    full_kl: bool
    max_mismatch_k3: Positive
    worst_tokens: CountOrZero
    nonfinite_scores: Literal["error", "drop"]

    @model_validator(mode="after")
    def _each_step_back_once(self) -> "ScoreParams":
        if len(set(self.replay)) != len(self.replay):
            raise ValueError(f"replay is {self.replay}: each step back may be listed once")
        return self


class AdvantageParams(Section):
    """Reward shaping, the advantage estimator, whitening, and the off-policy correction."""

    estimator: Literal[
        "gae", "reward_minus_value", "rloo", "grpo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ]
    gamma: Probability
    gae_lambda: Probability
    value_gae_lambda: Probability | None
    kl_coef: NonNegative
    kl_estimator: Literal["k1", "k2", "k3", "absolute", "full"]
    kl_controller: Literal["fixed", "adaptive"]
    kl_target: Positive
    kl_horizon: Count
    score_scaling: Literal["none", "running_std", "running_mean_std"]
    score_clip: Positive | None
    missing_eos_penalty: NonNegative
    missing_eos_mode: Literal["subtract", "replace", "scale"]
    overlong_buffer: CountOrZero
    overlong_penalty: NonNegative
    whiten_rewards: bool
    whiten_advantages: bool
    whitening_variance: Literal["population", "bessel"] | None
    correction: Literal["none", "truncate", "mask", "reject_sequence"]
    correction_min: Annotated[float, Field(gt=0, lt=1)]
    correction_max: Annotated[float, Field(gt=1, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _scale_is_a_share(self) -> "AdvantageParams":
        if self.missing_eos_mode == "scale" and self.missing_eos_penalty > 1:
            raise ValueError(
                f"missing_eos_penalty is {self.missing_eos_penalty}: with missing_eos_mode scale the score is"
                " multiplied by 1 - missing_eos_penalty, so expected 0 to 1"
            )
        if self.kl_controller == "adaptive" and self.kl_coef == 0:
            raise ValueError("kl_coef is 0: an adaptive controller multiplies it, so it would stay 0; start above 0")
        return self


class PpoUpdateParams(Section):
    """The clipped policy and value update."""

    learning_rate: Positive
    value_head_learning_rate: Positive
    critic_learning_rate: Positive
    critic_warmup_iterations: CountOrZero
    lora_rank: CountOrZero
    lora_alpha: Positive
    lora_targets: LoraTargets | None
    lr_schedule: Literal["constant", "linear", "cosine"]
    schedule_steps: Count
    warmup_steps: CountOrZero
    optimizer: Literal["adamw", "adamw_8bit"]
    adam_betas: Betas
    adam_eps: Positive
    weight_decay: NonNegative
    max_grad_norm: Positive
    max_skipped_steps: CountOrZero
    ppo_epochs: Count
    minibatch_size: Count
    old_logprobs: Literal["trainer", "sampler"]
    ratio: Literal["token", "sequence"]
    clip_range: Annotated[float, Field(gt=0, lt=1)]
    clip_range_high: Positive | None
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None
    value_clip_range: Positive | None
    value_coef: NonNegative
    entropy_coef: NonNegative
    kl_loss_coef: NonNegative
    kl_loss_estimator: Literal["k1", "k2", "k3", "absolute"]
    aggregation: Literal["token_mean", "sequence_mean", "constant"]
    aggregation_constant: Positive | None
    target_kl: Positive | None
    max_kl: Positive | None
    save_every: CountOrZero

    @model_validator(mode="after")
    def _schedule(self) -> "PpoUpdateParams":
        if self.lr_schedule != "constant" and self.warmup_steps >= self.schedule_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below schedule_steps ({self.schedule_steps})")
        return self


class EvaluateParams(Section):
    """Held-out evaluation."""

    max_prompts: Count | None
    samples_per_prompt: Count
    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]
    rewards: RewardsParams

    @model_validator(mode="after")
    def _not_nearly_greedy(self) -> "EvaluateParams":
        if 0 < self.temperature < 0.01:
            raise ValueError(
                f"temperature is {self.temperature}: expected 0 (greedy) or 0.01 to 10; vLLM changes what lies between"
            )
        return self


class Params(Section):
    """All of params.yaml."""

    seed: CountOrZero
    conventions: Literal["ours", "trl", "verl", "openrlhf"]
    compute: ComputeParams
    sampling: SamplingParams
    base_model: BaseModelParams
    ingest: IngestParams
    train_rm: TrainRmParams
    critic: CriticParams
    rollout: RolloutParams
    rewards: RewardsParams
    score: ScoreParams
    advantages: AdvantageParams
    ppo_update: PpoUpdateParams
    evaluate: EvaluateParams

    @model_validator(mode="after")
    def _across_sections(self) -> "Params":
        responses = self.rollout.prompts_per_iteration * self.rollout.samples_per_prompt
        if responses % self.ppo_update.minibatch_size:
            raise ValueError(
                f"ppo_update.minibatch_size ({self.ppo_update.minibatch_size}) must divide the"
                f" {responses} responses of an iteration"
                f" (rollout.prompts_per_iteration {self.rollout.prompts_per_iteration}"
                f" x samples_per_prompt {self.rollout.samples_per_prompt})"
            )
        if self.ingest.max_prompt_tokens >= self.sampling.max_model_len:
            raise ValueError(
                f"ingest.max_prompt_tokens ({self.ingest.max_prompt_tokens}) must be below"
                f" sampling.max_model_len ({self.sampling.max_model_len}), or no response token fits"
            )
        for group, sources in (("rewards", self.rewards), ("evaluate.rewards", self.evaluate.rewards)):
            for name, source in sources.items():
                if isinstance(source, RewardModelSource) and source.path is None and self.ingest.preferences is None:
                    raise ValueError(
                        f"{group}.{name} is the trained reward model, but ingest.preferences is null: there is nothing"
                        " to train it on"
                    )
        return self

    @model_validator(mode="after")
    def _estimator_has_what_it_needs(self) -> "Params":
        advantages = self.advantages
        if self.critic.kind == "none" and advantages.estimator in NEED_CRITIC:
            raise ValueError(
                f"advantages.estimator is {advantages.estimator}, which needs values, but critic.kind is none"
            )
        if self.critic.kind == "none" and self.ppo_update.critic_warmup_iterations:
            raise ValueError(
                f"ppo_update.critic_warmup_iterations is {self.ppo_update.critic_warmup_iterations}, but critic.kind is"
                " none: nothing would learn"
            )
        if self.critic.init == "reward_model" and self.ingest.preferences is None:
            raise ValueError(
                "critic.init is reward_model, but ingest.preferences is null: there is nothing to train it on"
            )
        if advantages.estimator in NEED_GROUPS and advantages.whiten_rewards:
            raise ValueError(
                f"advantages.estimator is {advantages.estimator}, which compares sums of rewards: whiten_rewards would"
                " add the same amount to every token and so reward length; set it to false"
            )
        responses = self.rollout.prompts_per_iteration * self.rollout.samples_per_prompt
        if advantages.kl_controller == "adaptive" and responses >= 5 * advantages.kl_horizon:
            raise ValueError(
                f"advantages.kl_horizon ({advantages.kl_horizon}) must be above a fifth of the {responses} responses of"
                " an iteration, or one iteration of low KL would set the coefficient to 0 for ever"
            )
        if advantages.kl_estimator == "full" and not self.score.full_kl:
            raise ValueError("advantages.kl_estimator is full, which needs score.full_kl: true")
        if advantages.estimator in NEED_GROUPS and self.rollout.samples_per_prompt == 1:
            raise ValueError(
                f"advantages.estimator is {advantages.estimator}, which compares the responses to one prompt, but"
                " rollout.samples_per_prompt is 1"
            )
        return self

    @model_validator(mode="after")
    def _off_policy(self) -> "Params":
        correction, sampler = self.advantages.correction, self.ppo_update.old_logprobs == "sampler"
        if sampler and correction != "none":
            raise ValueError(
                f"advantages.correction is {correction}, but ppo_update.old_logprobs is sampler: its ratios already"
                " start at the sampler's policy; set one of the two to its default"
            )
        if self.advantages.overlong_buffer > self.sampling.max_new_tokens:
            raise ValueError(
                f"advantages.overlong_buffer ({self.advantages.overlong_buffer}) must not be above"
                f" sampling.max_new_tokens ({self.sampling.max_new_tokens}), or every response would be penalised"
            )
        if self.score.replay and correction == "none" and not sampler:
            raise ValueError(
                "score.replay mixes in responses of older policies, which advantages.correction none would treat as"
                " the current policy's: set advantages.correction to truncate, mask or reject_sequence"
            )
        if self.rollout.prompts_per_iteration == 0 and not self.score.replay:
            raise ValueError("rollout.prompts_per_iteration is 0 and score.replay is empty: nothing to train on")
        return self


class Iteration(BaseModel):
    """One entry of iterations.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prev: str
    rollout: dict[str, Any]
    score: dict[str, Any]
    advantages: dict[str, Any]
    ppo_update: dict[str, Any]


class Run(BaseModel):
    """params.yaml together with iterations.yaml."""

    model_config = ConfigDict(frozen=True)

    params: Params
    iterations: dict[str, Iteration]
    effective: dict[str, Params]

    def at(self, iteration: str) -> Params:
        """Return the parameters of one iteration, its overrides applied. "0" (the base model) has none."""
        if iteration == BASE_ITERATION:
            return self.params
        if iteration not in self.iterations:
            raise ConfigError(
                f"iterations.yaml has no iteration {iteration!r}; it has {', '.join(self.iterations) or 'none'}"
            )
        return self.effective[iteration]

    def chain(self, iteration: str) -> list[str]:
        """Return the iterations that lead to this one, the first first and this one last, without "0"."""
        path: list[str] = []
        while iteration != BASE_ITERATION:
            path.append(iteration)
            iteration = self.iterations[iteration].prev
        return path[::-1]


def read_yaml(path: Path) -> Any:
    """Read a YAML 1.2 file (DVC's dialect), by the parser in Python: its messages show the place, libyaml's do not.

    Raises:
        ConfigError: If the file is missing or is not YAML; the message has the line and column.
    """
    try:
        return YAML(typ="safe", pure=True).load(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; run from the project's root") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        found = f"byte 0x{error.object[error.start]:02x} in line {line}"
        raise ConfigError(f"{path}: expected UTF-8, found {found}; save the file as UTF-8") from None
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply to be read") from None
    except (ValueError, LookupError) as error:  # from ruamel, for what looks like a date or a number and is none
        raise ConfigError(
            f"{path}: not valid YAML: {error}; put text that looks like a date or a number in quotes"
        ) from None


def load_run(root: str | Path = ".") -> Run:
    """Read and check params.yaml and iterations.yaml.

    Raises:
        ConfigError: With one line for every problem of both files.
    """
    root = Path(root)
    raw = read_yaml(root / "params.yaml")
    raw_iterations = read_yaml(root / "iterations.yaml")
    problems: list[str] = []
    params = _parse(Params, raw, "params.yaml", problems)
    iterations = _parse_iterations(raw_iterations, problems)
    effective: dict[str, Params] = {}
    if params is not None:
        for name, iteration in iterations.items():
            merged = dict(raw)
            for section in ITERATION_SECTIONS:
                merged[section] = {**raw[section], **getattr(iteration, section)}
            found = _parse(Params, merged, f"iterations.yaml: iteration {name!r}", problems)
            if found is not None:
                effective[name] = found
    problems += _changed_adapters(iterations, effective)
    if problems or params is None:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return Run(params=params, iterations=iterations, effective=effective)


def _changed_adapters(iterations: dict[str, Iteration], effective: dict[str, Params]) -> list[str]:
    """Adapters are handed on from iteration to iteration, so a chain has the same ones throughout."""
    problems = []
    for name, iteration in iterations.items():
        if name not in effective or iteration.prev not in effective:
            continue
        here, before = effective[name].ppo_update, effective[iteration.prev].ppo_update
        for key in ("lora_rank", "lora_targets"):
            if getattr(here, key) != getattr(before, key):
                problems.append(
                    f"iterations.yaml: iteration {name!r}: ppo_update.{key} is {getattr(here, key)}, but"
                    f" {getattr(before, key)} in iteration {iteration.prev!r} before it; expected one value in a chain"
                )
    return problems


def _parse_iterations(raw: Any, problems: list[str]) -> dict[str, Iteration]:
    where = "iterations.yaml"
    if not isinstance(raw, dict) or set(raw) != {"iterations"} or not isinstance(raw["iterations"], dict):
        problems.append(f"{where}: expected one key `iterations` holding a map of iterations")
        return {}
    iterations: dict[str, Iteration] = {}
    for name, entry in raw["iterations"].items():
        if not isinstance(name, str):
            problems.append(
                f'{where}: iteration key {name!r} is not quoted; write "{name}": (DVC would silently run nothing)'
            )
            continue
        if not (name.isascii() and name.isalnum()) or name == BASE_ITERATION:
            problems.append(
                f"{where}: iteration key {name!r}: expected letters and digits only, and not"
                f" {BASE_ITERATION!r} (the base model)"
            )
            continue
        found = _parse(Iteration, entry, f"{where}: iteration {name!r}", problems)
        if found is not None:
            iterations[name] = found
    known = {BASE_ITERATION, *(str(name) for name in raw["iterations"])}  # broken entries too: they were reported above
    for name, iteration in iterations.items():
        if iteration.prev not in known:
            problems.append(
                f"{where}: iteration {name!r}: prev is {iteration.prev!r}; expected one of"
                f" {', '.join(sorted(known - {name}))}"
            )
    for name in iterations:
        seen: set[str] = set()
        at: str = name
        while at in iterations and at not in seen:
            seen.add(at)
            at = iterations[at].prev
        if at in seen:
            problems.append(f"{where}: iteration {name!r}: prev leads in a circle and never reaches {BASE_ITERATION!r}")
    return iterations


def _parse(model: type[Model], raw: Any, where: str, problems: list[str]) -> Model | None:
    if not isinstance(raw, dict):
        problems.append(f"{where}: expected a map, found {type(raw).__name__}")
        return None
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        for item in error.errors():
            problems.append(explain(model, item, where))
        return None
