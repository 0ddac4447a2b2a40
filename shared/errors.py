"""The one tree of errors that this project raises on purpose.

    RedraftError
    ├── ConfigError        a setting, flag, variable or file on disk that the operator can mend
    ├── ArtifactError      a drafter artifact that does not fit, is torn, or is not what its hash says
    ├── TraceError         a trace record that cannot be read (goes to the dead-letter stream)
    ├── RequestError       a request that the API refuses; carries the HTTP meaning, not the HTTP code
    │   ├── Overloaded     the queue is full; try again after `retry_after_s`
    │   └── NotReady       the replica is still loading or is draining
    ├── Declined           the learner was given an order and says why it does not follow it
    └── ServiceDown        Redis, MLflow or the learner cannot be reached; the caller counts it and goes on
        └── Unreadable     it answers, but what it holds under a key makes no sense; whoever owns the key replaces it

Raise these for what a user, a file, the network or a setting did. `assert` is for our own promises.
Every message names the field, the problem and the remedy.
"""

from __future__ import annotations


class RedraftError(Exception):
    """Base of everything above."""


class ConfigError(RedraftError):
    """A setting is wrong: `field` is the dotted key (or path), `remedy` what to do about it."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}. {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy


class ArtifactError(RedraftError):
    """A drafter artifact must not be served; `reason` is a short stable word for counters.

    Reasons in use: truncated, hash, format, base, target, shape, vocabulary.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TraceError(RedraftError):
    """A record on the trace stream is not a trace of a version that we read."""


class RequestError(RedraftError):
    """A request is refused. `param` is the field's JSON path, `code` OpenAI's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


class Overloaded(RequestError):
    """The replica's queue is full."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class NotReady(RequestError):
    """The replica cannot take requests now (loading or draining)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="not_ready")


class Declined(RedraftError):
    """The learner does not follow an order."""


class ServiceDown(RedraftError):
    """A neighbour (Redis, MLflow, learner) cannot be reached."""


class Unreadable(ServiceDown):
    """A value that a neighbour holds makes no sense; `text` is what is there, as bytes."""

    def __init__(self, message: str, text: bytes) -> None:
        super().__init__(message)
        self.text = text
