"""What learned placers raise."""

from dovetail.errors.base import FileFormatError, InvalidError, RunError


class PolicyFileError(FileFormatError):
    """A policy file that is broken, foreign, or of another version."""


class PolicyMismatchError(InvalidError):
    """A policy that cannot serve this problem: made for another graph, or of another method."""

    def __init__(self, policy: str, reason: str) -> None:
        super().__init__(f"policy {policy} cannot be used here: {reason}")
        self.policy = policy
        self.reason = reason


class EvaluatorsLostError(RunError):
    """Evaluators of a controller died more often than is allowed."""

    def __init__(self, lost: int, status: str) -> None:
        super().__init__(f"{lost} evaluators were lost, the last one {status}")
        self.lost = lost
        self.status = status
