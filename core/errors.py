"""The errors that a user can meet, each with the exit code that the contract gives it.

An `assert` elsewhere states an internal invariant; whatever a user or a file can cause is one of these,
with a sentence that names the field, the value and the remedy.
"""

EXIT_DONE = 0
EXIT_GATE_FAIL = 1
EXIT_REFUSED = 2
EXIT_GATE_INCONCLUSIVE = 3
EXIT_WORK_FAILED = 4
EXIT_INTERRUPTED = 130


class BitsmithError(Exception):
    """Base of every error whose text is meant for the user; shown without a traceback."""

    exit_code = EXIT_WORK_FAILED


class Refused(BitsmithError):
    """Refused before work began: usage, configuration, preflight, an artifact that does not verify."""

    exit_code = EXIT_REFUSED


class WorkFailed(BitsmithError):
    """Failed in the work; resumable state is kept and the text says how to resume."""

    exit_code = EXIT_WORK_FAILED
