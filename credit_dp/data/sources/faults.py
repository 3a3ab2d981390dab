"""What is said when fields can't be read, and how a store that changes meanwhile is noticed."""

from collections.abc import Sequence
from typing import final

import numpy as np

from credit_dp.data.disk import METADATA, stamp
from credit_dp.data.sources.address import is_remote, local_path, reason_of, without_secrets
from credit_dp.data.sources.complete import AbsentChunkError
from credit_dp.data.sources.intact import TruncatedChunkError
from credit_dp.errors import UserError

READS_BETWEEN_CHECKS = 64


def unreadable(
    where: str, variable: str, date: np.datetime64 | None, error: BaseException
) -> UserError:
    """One line: file, variable and date, what is wrong, and what to do."""
    when = "" if date is None else f" at {date.astype('M8[m]')}"
    advice = "" if date is None else ", or choose other dates: data.dates.train, .valid and .test"
    return UserError(
        f"{without_secrets(where)}: {variable}{when} can't be read: {_problem(error)}. "
        f"Restore the file{advice}."
    )


def _problem(error: BaseException) -> str:
    if isinstance(error, AbsentChunkError):
        return (
            f"its chunk {error} is missing (if it was left out for being constant, write it with "
            "write_empty_chunks=True)"
        )
    if isinstance(error, TruncatedChunkError):
        return f"its chunk {error}: it is cut short"
    if "checksum" in str(error).lower():
        return "the checksum of a chunk is wrong"
    return f"a chunk is damaged or out of reach ({reason_of(error)})"


@final
class Watch:
    """Notices that a store was written anew since it was opened.

    It looks at the metadata: of a store on this machine every 64 reads and when there is reason, of
    a remote one only when a read has failed. Values that are written over in place, under the
    same metadata, are not noticed.
    """

    def __init__(self, where: str, variables: Sequence[str]) -> None:
        self._where = where
        self._remote = is_remote(where)
        self._files = [
            local_path(where) / folder / name for folder in ("", *variables) for name in METADATA
        ]
        self._files.append(local_path(where))
        self._reads = 0
        self._first = self._now()

    def after_read(self, suspicious: bool) -> None:
        """Look, if it is time to, or if there is reason.

        Raises:
            UserError: the store has changed.
        """
        self._reads += 1
        due = self._reads % READS_BETWEEN_CHECKS == 0
        if not self._remote and (suspicious or due):
            self.check()

    def check(self) -> None:
        """Look now.

        Raises:
            UserError: the store has changed.
        """
        try:
            changed = self._now() != self._first
        except (OSError, UserError):  # what failed is what the caller knows of
            return
        if changed:
            raise UserError(
                f"{without_secrets(self._where)}: has changed since it was opened. Start again "
                "when it is complete, or set data.store to one that nobody writes to."
            )

    def _now(self) -> object:
        if self._remote:
            return stamp(self._where)
        found = []
        for path in self._files:
            if path.is_file():
                status = path.stat()
                found.append((str(path), status.st_mtime_ns, status.st_size))
        return found
