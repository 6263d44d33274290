"""Errors a person can act on: each says what was expected, what was found, where, and what to do."""


class RlhfError(ValueError):
    """Root of all errors that this project raises on purpose."""


class ConfigError(RlhfError):
    """params.yaml, iterations.yaml or the environment cannot be used as they are."""


class DataError(RlhfError):
    """A row or file that a person supplied (prompts, preferences) cannot be used."""


class ModelError(RlhfError):
    """A model directory or checkpoint cannot be used for the role it was given."""


class SandboxError(RlhfError):
    """Programs cannot be run with the isolation that is asked for. Never because of what a program does."""


class DiskError(RlhfError):
    """The disk, or a limit on it, does not take or give what is to be written or read."""


class ArtifactError(RlhfError):
    """A file written by an earlier stage cannot be used."""


class SchemaMismatch(ArtifactError):
    """Columns, types or the schema version of a file differ from what its reader needs."""


class RowMismatch(ArtifactError):
    """Rows that should correspond do not: ids, counts or list lengths disagree."""


class StaleInput(ArtifactError):
    """A file was made from other inputs than the ones it is now used with."""


class NumericError(RlhfError):
    """A number that must be finite, or inside a range, is not."""


class NonFiniteStep(NumericError):
    """A loss or gradient is not finite, so the optimiser step was not taken."""


class OutOfMemory(RlhfError):
    """The smallest piece of work there is, one row, does not fit into memory."""


class RewardError(RlhfError):
    """A reward source failed, or what it returned is no score."""


class AnswerError(RewardError):
    """A source or its service answered something else than a score for each row."""
