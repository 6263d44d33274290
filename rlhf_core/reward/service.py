"""Requests to services that score: time limits, retries with backoff, a bearer token, and what is kept of them.

A request is tried again, after backoff_s * 2^(tries so far - 1) seconds, when the service cannot be reached, is too
slow, answers 408, 429 or 5xx, or answers what its reader refuses. Any other status stops at once: it would not change.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx

from rlhf_core.errors import AnswerError, ConfigError, RewardError

logger = logging.getLogger("rlhf")

Answer = TypeVar("Answer")

MAX_ANSWER_BYTES = 64 * 2**20
_EXCERPT = 200  # characters of an answer that a message shows
_TRY_AGAIN = (408, 429)


@dataclass(frozen=True)
class Service:
    """An open connection to one address, and the rule by which its requests are tried again."""

    client: httpx.Client
    url: str
    timeout_s: float  # for a whole request, its answer included
    retries: int  # further tries after the first
    backoff_s: float
    token: str | None

    def ask(self, payload: Mapping[str, Any], read: Callable[[Any], Answer], where: str) -> Answer:
        """Send JSON and return what a reader makes of the JSON that comes back.

        Args:
            payload: The request.
            read: From the parsed answer to what is wanted. Raises AnswerError for what it cannot use.
            where: Names source, shard and rows.

        Raises:
            RewardError: After the last try, or at once for a status that would not change; with the last cause.
        """
        for tries in range(1, self.retries + 2):
            try:
                return read(self._post(payload, where))
            except (httpx.RequestError, AnswerError) as error:
                kind = "" if isinstance(error, AnswerError) else f"{type(error).__name__}: "
                cause = f"{kind}{error}"
            if tries <= self.retries:
                wait = self.backoff_s * 2 ** (tries - 1)
                logger.warning("%s: %s: %s; trying again in %g s", where, self.url, cause, wait)
                time.sleep(wait)
        raise RewardError(
            f"{where}: {self.url}: {cause} (try {self.retries + 1} of {self.retries + 1}). What was scored before is"
            " kept: run again when the service is well"
        )

    def _post(self, payload: Mapping[str, Any], where: str) -> Any:
        deadline, body = time.monotonic() + self.timeout_s, bytearray()
        with self.client.stream("POST", self.url, json=dict(payload)) as response:
            # The client's own limit is one between two bytes, which a slow enough answer never meets.
            for chunk in response.iter_bytes():
                body += chunk
                if time.monotonic() > deadline:
                    raise AnswerError(f"the answer took longer than timeout_s = {self.timeout_s:g} s")
                if len(body) > MAX_ANSWER_BYTES:
                    raise AnswerError(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
        text = self._hidden(body.decode("utf-8", errors="replace"))  # some services say what they were sent
        if response.status_code in _TRY_AGAIN or response.status_code >= 500:
            raise AnswerError(f"status {response.status_code}: {shown(text)}")
        if response.status_code != 200:
            raise RewardError(f"{where}: {self.url}: status {response.status_code}: {shown(text)}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise AnswerError(f"the answer is not JSON: {shown(text)}") from None

    def _hidden(self, text: str) -> str:
        return text.replace(self.token, "***") if self.token else text


@contextmanager
def open_service(
    url: str, *, timeout_s: float, retries: int, backoff_s: float, auth_env: str | None
) -> Iterator[Service]:
    """Open a connection to a service, and close it in the end.

    Args:
        url: Where requests go.
        timeout_s: Seconds for one request.
        retries: Further tries after the first.
        backoff_s: Seconds before the second try; doubled for each further one.
        auth_env: Environment variable with the bearer token, or None for none. The token is in no file and no message.

    Raises:
        ConfigError: If the variable is not set, or holds what no token holds.
    """
    token = None if auth_env is None else _token(auth_env)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(headers=headers, timeout=timeout_s) as client:
        try:
            client.build_request("POST", url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"rewards: {url}: {error}") from None
        yield Service(client, url, timeout_s, retries, backoff_s, token)


def _token(auth_env: str) -> str:
    token = os.environ.get(auth_env, "").strip()
    if not token:
        raise ConfigError(f"rewards: auth_env is {auth_env}, but that environment variable is not set")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(f"rewards: the environment variable {auth_env} holds spaces or characters that no token has")
    return token


def shown(text: str) -> str:
    """Return the beginning of a text, for a message."""
    return repr(text if len(text) <= _EXCERPT else text[:_EXCERPT] + "...")


def kept_scores(path: Path, *, nonfinite: Literal["error", "drop"]) -> dict[str, float]:
    """Return what was scored of a shard before the stage stopped, by sample_id; empty if nothing was.

    Args:
        path: Lines of [sample_id, score]. A last line that is not whole (the process was killed) does not count.
        nonfinite: With error, a NaN that was kept while it was drop does not count.
    """
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    found = {sample_id: score for sample_id, score in map(json.loads, lines)}
    return {sample_id: score for sample_id, score in found.items() if nonfinite == "drop" or math.isfinite(score)}


def keep_scores(path: Path, scores: Mapping[str, float]) -> None:
    """Add scores by sample_id to such a file, on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_text(encoding="utf-8").rpartition("\n") if path.is_file() else ("", "", "")
    if whole[2]:  # the rest of a line that a killed process left
        path.write_text(whole[0] + whole[1], encoding="utf-8")
    with path.open("a", encoding="utf-8") as handle:
        handle.writelines(json.dumps([sample_id, score]) + "\n" for sample_id, score in scores.items())
        handle.flush()
        os.fsync(handle.fileno())
