"""What training by a parameter server raises."""

from dovetail.errors.base import FileFormatError, InvalidError, RunError


class UnknownRuleError(InvalidError):
    def __init__(self, rule: str, known: tuple[str, ...]) -> None:
        super().__init__(f"there is no update rule {rule!r}; there are {', '.join(known)}")
        self.rule = rule
        self.known = known


class JournalError(FileFormatError):
    """A journal or snapshot that was changed since it was written, or is another program's."""


class RunMismatchError(InvalidError):
    """A run folder that belongs to another run."""

    def __init__(self, folder: str, field: str, expected: object, found: object) -> None:
        super().__init__(
            f"{folder} holds a run whose {field} is {found}, but here it is {expected}; resume it "
            "with what it was started with, or give another folder"
        )
        self.folder = folder
        self.field = field
        self.expected = expected
        self.found = found


class TrainingError(RunError):
    """A training run that cannot go on; its last state is kept where it has a folder."""


class DivergedError(TrainingError):
    """The center left all bounds: commits were refused, or the loss grew without end."""

    def __init__(self, rule: str, detail: str, advice: str = "") -> None:
        super().__init__(
            f"training by {rule} diverged: {detail}" + (f"; {advice}" if advice else "")
        )
        self.rule = rule
        self.detail = detail
        self.advice = advice


class ServerLostError(TrainingError):
    """The parameter server died more often than the policy allows."""

    def __init__(self, restarts: int, status: str) -> None:
        super().__init__(f"the parameter server died, {status}, after {restarts} restarts")
        self.restarts = restarts
        self.status = status


class NoWorkersError(TrainingError):
    """Too few workers: all are gone or hung, or more were lost than the policy replaces."""

    def __init__(self, lost: int, status: str) -> None:
        super().__init__(
            f"{lost} workers were lost, more than the policy allows; the last of them: {status}"
        )
        self.lost = lost
        self.status = status
