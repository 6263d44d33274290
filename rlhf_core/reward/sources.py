"""From `rewards` and `evaluate.rewards` of params.yaml to passes over the rows: what scores them, by kind."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.artifacts.provenance import hash_path
from rlhf_core.artifacts.schema import score_column
from rlhf_core.errors import DataError, ModelError
from rlhf_core.ranges import Section
from rlhf_core.reward import answers, rules
from rlhf_core.reward.code import code_scores
from rlhf_core.reward.http_service import service_scores
from rlhf_core.reward.judge import judge
from rlhf_core.reward.language import language_score
from rlhf_core.reward.llm_judge import judge_scores, reply_reader
from rlhf_core.reward.passes import Passes
from rlhf_core.reward.rows import Row
from rlhf_core.reward.sandbox import Limits
from rlhf_core.reward.service import open_service
from rlhf_core.reward.user_function import USER_REWARDS, call_function, load_function
from rlhf_core.reward_config import (
    TRANSPORT,
    CodeSource,
    ExactAnswerSource,
    HttpSource,
    JsonFormatSource,
    JudgeSource,
    LanguageSource,
    LastNumberSource,
    LengthSource,
    LlmJudgeSource,
    PythonSource,
    RegexSource,
    RepetitionSource,
    RewardModelSource,
)

_CONNECTION = {"timeout_s", "retries", "backoff_s", "auth_env"}  # what open_service takes


def described_sources(rewards: Mapping[str, Section]) -> dict[str, dict[str, Any]]:
    """Return all that the scores depend on, by source: their parameters, less how a service is reached."""
    return {name: source.model_dump(exclude=set(TRANSPORT)) for name, source in rewards.items()}


def described_inputs(rewards: Mapping[str, Section]) -> dict[str, str]:
    """Return the hash of user_rewards/ where a source is a function in it; else nothing."""
    has_function = any(isinstance(source, PythonSource) for source in rewards.values())
    return {"user_rewards": hash_path(USER_REWARDS)} if has_function else {}


def described_models(rewards: Mapping[str, Section], trained: Path, *, group: str) -> dict[str, str]:
    """Return the hash of the directory of each source that is a reward model.

    Args:
        rewards: As for reward_models.
        trained: The same.
        group: Where params.yaml has them, for messages.

    Raises:
        ModelError: If one is no directory.
    """
    found = {}
    for name, directory in reward_models(rewards, trained).items():
        if not directory.is_dir():
            raise ModelError(
                f"{group}.{name}.path is {directory}, which is no directory; an id of the Hugging Face hub is not taken"
                " here: download it (`hf download`) and give the directory"
            )
        found[name] = hash_path(directory)
    return found


def check_functions(rewards: Mapping[str, Section]) -> None:
    """Import each source that is a function, so that a mistake shows before anything expensive runs.

    Raises:
        ConfigError: If one cannot be imported.
    """
    for source in rewards.values():
        if isinstance(source, PythonSource):
            load_function(source.function)


def reward_models(rewards: Mapping[str, Section], trained: Path) -> dict[str, Path]:
    """Return the directory of each source that is a reward model.

    Args:
        rewards: A map of sources of params.yaml.
        trained: What a null path stands for.
    """
    return {
        name: trained if source.path is None else Path(source.path)
        for name, source in rewards.items()
        if isinstance(source, RewardModelSource)
    }


def run_reward_models(passes: Passes, models: Mapping[str, Path]) -> None:
    """Score all rows by each reward model, one in memory at a time.

    Args:
        passes: Where to; each source's scores go to the pass named like its column.
        models: From reward_models.
    """
    for name, directory in models.items():
        passes.reward_model(score_column(name), directory)


def run_other_sources(passes: Passes, rewards: Mapping[str, Section]) -> None:
    """Score all rows by each source that is no reward model: rules and functions first, then services.

    Args:
        passes: Where to, as for run_reward_models.
        rewards: As for reward_models.
    """
    others = [(name, source) for name, source in rewards.items() if not isinstance(source, RewardModelSource)]
    for name, source in sorted(others, key=lambda item: isinstance(item[1], HttpSource | LlmJudgeSource)):
        run_source(passes, name, source)


def run_source(passes: Passes, name: str, source: Section) -> None:
    """Score all rows by one source without a model of its own.

    Raises:
        RewardError: With source, shard, row and value.
        DataError: If a row's ground truth is not what the rule needs.
    """
    column = score_column(name)
    if isinstance(source, HttpSource):
        http_service(passes, column, source)
    elif isinstance(source, LlmJudgeSource):
        llm_judge(passes, column, source)
    elif isinstance(source, PythonSource):
        function = load_function(source.function)
        passes.rows(column, lambda rows, shard, where: call_function(function, rows, where))
    elif isinstance(source, CodeSource):
        code(passes, name, source)
    else:
        passes.rows(column, by_rule(rule(source)))


def http_service(passes: Passes, column: str, source: HttpSource) -> None:
    """Score all rows by a service."""
    with open_service(source.url, **source.model_dump(include=_CONNECTION)) as at:
        scored = partial(service_scores, at, batch_size=source.batch_size, nonfinite=passes.nonfinite_scores)
        passes.rows(column, lambda rows, shard, where: scored(rows, passes.kept(column, shard), where))


def llm_judge(passes: Passes, column: str, source: LlmJudgeSource) -> None:
    """Score all rows by a language model behind an endpoint."""
    url = source.base_url.rstrip("/") + "/chat/completions"
    with open_service(url, **source.model_dump(include=_CONNECTION)) as at:
        scored = partial(
            judge_scores,
            at,
            request={
                "model": source.model,
                "temperature": source.temperature,
                "max_tokens": source.max_reply_tokens,
            },
            template=source.prompt,
            read=reply_reader(source.pattern, source.min_score, source.max_score, nonfinite=passes.nonfinite_scores),
            concurrency=source.concurrency,
            nonfinite=passes.nonfinite_scores,
        )
        passes.rows(column, lambda rows, shard, where: scored(rows, passes.kept(column, shard), where))


def code(passes: Passes, name: str, source: CodeSource) -> None:
    """Score all rows by running their programs, and keep how each one's first test that did not pass ended."""
    options: dict[str, Any] = source.model_dump(include={"workers", "allow_unisolated"})
    limits = Limits(**source.model_dump(include=set(Limits.__annotations__)))

    def scores(rows: list[Row], shard: str, where: str) -> Any:
        found, outcomes = code_scores(rows, limits=limits, **options)
        passes.save_outcomes(name, shard, outcomes)  # first: the scores tell that the shard is done
        return found

    passes.rows(score_column(name), scores)


def by_rule(score: Callable[[Row], float]) -> Callable[[list[Row], str, str], list[float]]:
    """Return a rule for one row as one for a shard's rows, which names the row in an error."""

    def scores(rows: list[Row], shard: str, where: str) -> list[float]:
        found = []
        for row in rows:
            try:
                found.append(score(row))
            except DataError as error:
                raise DataError(f"{where}: sample {row['sample_id']}: {error}") from None
        return found

    return scores


def rule(source: Section) -> Callable[[Row], float]:
    """Return the function of a row that a rule's parameters stand for."""
    options = source.model_dump(exclude={"kind", "weight"})
    if isinstance(source, JudgeSource):
        return lambda row: judge(row["response"], row["finish_reason"])
    if isinstance(source, RegexSource):
        return lambda row: rules.regex_score(row["response"], **options)
    if isinstance(source, ExactAnswerSource):
        return lambda row: answers.exact_answer_score(row["response"], row["ground_truth"])
    if isinstance(source, LastNumberSource):
        return lambda row: answers.last_number_score(row["response"], row["ground_truth"], **options)
    if isinstance(source, LengthSource):
        return lambda row: rules.length_score(len(row["response_ids"]), **options)
    if isinstance(source, JsonFormatSource):
        return lambda row: rules.json_format_score(row["response"], **options)
    if isinstance(source, LanguageSource):
        return lambda row: language_score(row["response"], **options)
    assert isinstance(source, RepetitionSource), source
    return lambda row: rules.repetition_score(row["response_ids"], **options)
