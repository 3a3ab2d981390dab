"""A folder of zarr files that are there whole or not at all."""

import asyncio
import os
import uuid
from pathlib import Path
from typing import final

from zarr.core.buffer import Buffer
from zarr.storage import LocalStore, WrapperStore

ENDING = ".partial"


@final
class WholeFiles(WrapperStore[LocalStore]):
    """Writes each file under another name, makes sure that it is on the disk, then renames it.

    A process that is killed at any point leaves files that are whole, and at worst one with
    `ENDING`. Two writers of the same content don't harm each other.
    """

    async def set(self, key: str, value: Buffer) -> None:
        """See `zarr.abc.store.Store`."""
        path = self._store.root / key
        await asyncio.to_thread(write_whole, path, memoryview(value.as_buffer_like()).cast("B"))


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{ENDING}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes were writing in a folder."""
    for entry in os.scandir(folder):
        if entry.name.startswith(".") and entry.name.endswith(ENDING):
            Path(entry.path).unlink(missing_ok=True)
