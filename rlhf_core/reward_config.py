"""The kinds of reward sources that params.yaml may list under `rewards`, one class each (docs/rewards.md)."""

import difflib
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from rlhf_core.ranges import Count, CountOrZero, Finite, NonNegative, Positive, Section, Text

SourceName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,64}$")]
# A module below user_rewards/ and a function in it.
FunctionPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
EnvironmentVariable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
# How a service is reached, which has no part in what it answers: such a key may change while a stage is half done.
TRANSPORT = ("batch_size", "concurrency", "workers", "timeout_s", "retries", "backoff_s", "auth_env")

# ISO 639 codes that the library of the language rule tells apart (py3langid, less its code for "no language").
_CODES = (
    "ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa fi fo fr "
    "fuv fy ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km kn ko "
    "ku ky la lb lg lij ln lo lt ltg lv mg mk ml mn mr ms mt my ne nl nn no nso oc om or pa pcm pl ps pt qu ro ru "
    "rw sa sdh se si sk sl sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue "
    "zh zu"
)
LANGUAGES = _CODES.split()


class RewardModelSource(Section):
    """A sequence classifier: the trained one, or another."""

    kind: Literal["reward_model"]
    weight: Finite
    path: Text | None


class JudgeSource(Section):
    """The demo's judge."""

    kind: Literal["judge"]
    weight: Finite


class RegexSource(Section):
    """Whether a regular expression matches the response."""

    kind: Literal["regex"]
    weight: Finite
    pattern: Text
    match: Literal["fullmatch", "search"]

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        return compilable(pattern)


class ExactAnswerSource(Section):
    """Whether the response is the ground truth, up to case, spaces and outer punctuation."""

    kind: Literal["exact_answer"]
    weight: Finite


class LastNumberSource(Section):
    """Whether the last number of the response is that of the ground truth."""

    kind: Literal["last_number"]
    weight: Finite
    partial_credit: Annotated[float, Field(ge=0, lt=1)]


class LengthSource(Section):
    """Whether the response's length lies in a range."""

    kind: Literal["length"]
    weight: Finite
    min_tokens: CountOrZero
    max_tokens: CountOrZero
    falloff_tokens: Count

    @model_validator(mode="after")
    def _range(self) -> "LengthSource":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens})")
        return self


class JsonFormatSource(Section):
    """Whether the response is JSON, with these keys."""

    kind: Literal["json_format"]
    weight: Finite
    required_keys: list[Text]


class RepetitionSource(Section):
    """Minus the share of repeated n-grams."""

    kind: Literal["repetition"]
    weight: Finite
    ngram: Count


class LanguageSource(Section):
    """Whether the response is written in a language."""

    kind: Literal["language"]
    weight: Finite
    language: Text

    @field_validator("language")
    @classmethod
    def _known(cls, language: str) -> str:
        if language in LANGUAGES:
            return language
        plain = re.split("[-_]", language.lower())[0]  # en-US
        near = difflib.get_close_matches(plain, LANGUAGES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{language!r} is not a language code that is known: did you mean {near}? docs/rewards.md lists all"
        )


class PythonSource(Section):
    """A function in user_rewards/."""

    kind: Literal["python"]
    weight: Finite
    function: FunctionPath


class HttpSource(Section):
    """A service that scores batches of rows."""

    kind: Literal["http"]
    weight: Finite
    url: Text
    batch_size: Count
    timeout_s: Positive
    retries: CountOrZero
    backoff_s: NonNegative
    auth_env: EnvironmentVariable | None

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        return web_address(url)


class LlmJudgeSource(Section):
    """A language model behind an OpenAI-compatible endpoint that is asked for a number."""

    kind: Literal["llm_judge"]
    weight: Finite
    base_url: Text
    model: Text
    prompt: Text
    pattern: Text
    min_score: Finite
    max_score: Finite
    temperature: NonNegative
    max_reply_tokens: Count
    concurrency: Count
    timeout_s: Positive
    retries: CountOrZero
    backoff_s: NonNegative
    auth_env: EnvironmentVariable | None

    @field_validator("base_url")
    @classmethod
    def _address(cls, base_url: str) -> str:
        return web_address(base_url)

    @field_validator("prompt")
    @classmethod
    def _shows_the_response(cls, prompt: str) -> str:
        if "{response}" not in prompt:
            raise ValueError("has no {response}: the judge would not see what it judges")
        return prompt

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        if (groups := re.compile(compilable(pattern)).groups) != 1:
            raise ValueError(f"{pattern!r} has {groups} groups: expected one, around the number")
        return pattern

    @model_validator(mode="after")
    def _range(self) -> "LlmJudgeSource":
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score ({self.min_score}) must be below max_score ({self.max_score})")
        return self


class CodeSource(Section):
    """The share of its tests that the program in the response passes, in a sandbox (docs/sandbox.md)."""

    kind: Literal["code"]
    weight: Finite
    seconds: Positive
    memory_mb: Annotated[int, Field(ge=64)]
    disk_mb: Count
    processes: Count
    output_kb: Count
    workers: Count
    allow_unisolated: bool


RewardSource = Annotated[
    RewardModelSource
    | JudgeSource
    | RegexSource
    | ExactAnswerSource
    | LastNumberSource
    | LengthSource
    | JsonFormatSource
    | RepetitionSource
    | LanguageSource
    | PythonSource
    | HttpSource
    | LlmJudgeSource
    | CodeSource,
    Field(discriminator="kind"),
]
RewardsParams = Annotated[dict[SourceName, RewardSource], Field(min_length=1)]
KINDS: dict[str, type[Section]] = {
    "reward_model": RewardModelSource,
    "judge": JudgeSource,
    "regex": RegexSource,
    "exact_answer": ExactAnswerSource,
    "last_number": LastNumberSource,
    "length": LengthSource,
    "json_format": JsonFormatSource,
    "repetition": RepetitionSource,
    "language": LanguageSource,
    "python": PythonSource,
    "http": HttpSource,
    "llm_judge": LlmJudgeSource,
    "code": CodeSource,
}


def compilable(pattern: str) -> str:
    """Return a regular expression as it is.

    Raises:
        ValueError: If it is none.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


def web_address(url: str) -> str:
    """Return a URL as it is.

    Raises:
        ValueError: If it is not http or https with a host, or holds a user or password, which would be in params.yaml
            for all to read.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError("holds a user or password; name an environment variable with a bearer token in auth_env")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r}: expected http://host... or https://host...")
    return url
