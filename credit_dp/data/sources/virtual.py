"""Icechunk repositories and kerchunk references, opened by their own libraries as stores of zarr.

Both can be virtual: their chunks are parts of other files, such as netCDF, at addresses that the
repository or the reference file names. Only files in allowed folders are read: the folder in which
the repository or the reference file lies, and those that the environment variable
`CREDIT_DP_CHUNKS` lists. It is no key, as a config that comes with a model could set a key.
"""

import json
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.reference import LazyReferenceMapper, ReferenceFileSystem
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.errors import ZarrUserWarning
from zarr.storage import FsspecStore

from credit_dp.data.sources.address import (
    filesystem,
    is_network_error,
    is_remote,
    local_path,
    reason_of,
    redact_secrets,
    storage_options,
    unreachable_error,
)
from credit_dp.errors import UserError, install_extra

if TYPE_CHECKING:
    import icechunk

ALLOWED_FOLDERS = "CREDIT_DP_CHUNKS"
VERSION = re.compile(r"(?P<repository>.+)@(?P<kind>branch|tag|snapshot)\.(?P<name>[^/@]+)")
REFERENCES = (".json", ".parq", ".parquet")
# What Icechunk says if a repository or one of its versions is not there.
ABSENT = ("doesn't exist", "not found", "invalid snapshot id")


def is_icechunk(where: str) -> bool:
    """Whether an address is that of an Icechunk repository, by its name or what lies there."""
    if VERSION.fullmatch(where) or where.rstrip("/").endswith(".icechunk"):
        return True
    if is_remote(where):
        return False
    path = local_path(where)
    return (path / "snapshots").is_dir() and any((path / x).exists() for x in ("refs", "repo"))


def is_reference(where: str) -> bool:
    """Whether an address has the name of kerchunk references."""
    return where.rstrip("/").lower().endswith(REFERENCES)


def open_icechunk(where: str) -> "icechunk.IcechunkStore":
    """Open the snapshot that an address names; without a version, the latest one of `main`.

    Raises:
        UserError: there is no such repository or version, or its chunks are not allowed.
        UnreachableError: it is remote and does not answer.
    """
    try:
        import icechunk
    except ImportError as error:
        raise UserError(
            f"{redact_secrets(where)}: needs a package that is missing ({reason_of(error)}). "
            f"{install_extra('icechunk')}."
        ) from error

    # Virtual chunks have the codecs of their files.
    warnings.filterwarnings("ignore", "Numcodecs codecs are not in", ZarrUserWarning)
    icechunk.set_logs_filter(os.environ.get("ICECHUNK_LOG") or "error")
    address, kind, name = _split_version(where)
    if not is_remote(address) and not local_path(address).is_dir():
        raise UserError(
            f"{local_path(where).absolute()}: no such Icechunk repository. Set data.store to one "
            "that exists."
        )
    try:
        repository = icechunk.Repository.open(_storage(address))
        containers = [*(repository.config.virtual_chunk_containers or {})]
        for prefix in containers:
            check_allowed(prefix, where, allowed_folders(address))
        if containers:
            access = {prefix: _credentials(prefix) for prefix in containers}
            repository = repository.reopen(authorize_virtual_chunk_access=access)
        if kind == "snapshot":
            repository.lookup_snapshot(name)  # a session would find out when it reads
        version: dict[str, Any] = {"snapshot_id" if kind == "snapshot" else kind: name}
        return repository.readonly_session(**version).store
    except icechunk.IcechunkError as error:
        reason = reason_of(error).removeprefix("x ")
        if is_remote(address) and not any(text in reason for text in ABSENT):
            raise unreachable_error(where, reason) from error
        raise UserError(
            f"{redact_secrets(where)}: not a version of an Icechunk repository that can be read "
            f"({reason}). Set data.store to one, as PATH@branch.NAME, PATH@tag.NAME or "
            "PATH@snapshot.ID."
        ) from error


def snapshot_id(where: str) -> str:
    """Return the number of the snapshot that an address names now, as a branch moves on."""
    return open_icechunk(where).session.snapshot_id


def chunk_files(store: object, most: int) -> tuple[list[str], bool]:
    """Return addresses of files that have chunks of a store, and whether these are all.

    Args:
        most: addresses to return, evenly spaced ones.
    """
    if isinstance(store, ReferenceStore):
        # The lists on a server, one for each array, would all be fetched.
        if is_remote(store.where) and isinstance(store.fs.references, LazyReferenceMapper):
            return [], False
        entries = store.fs.references.values()
        named = {entry[0] for entry in entries if isinstance(entry, (list, tuple)) and entry}
    else:
        session = getattr(store, "session", None)  # of Icechunk, which need not be installed
        if session is None or not session.config.virtual_chunk_containers:
            return [], True
        named = {*session.all_virtual_chunk_locations()}
    addresses = sorted(x for x in named if x and isinstance(x, str))
    return addresses[:: max(1, -(-len(addresses) // most))], len(addresses) <= most


def has_chunks_in_files(store: object, array: str) -> bool:
    """Whether the first chunk of an array with one dim is in another file."""
    if isinstance(store, ReferenceStore):
        return isinstance(store.fs.references.get(f"{array}/0"), (list, tuple))
    session = getattr(store, "session", None)  # of Icechunk, which need not be installed
    # Its type of chunk is VIRTUAL in release 1, and virtual in release 2.
    return session is not None and "virtual" in str(session.chunk_type(f"/{array}", (0,))).lower()


def _split_version(where: str) -> tuple[str, str, str]:
    match = VERSION.fullmatch(where)
    return (
        (match["repository"], match["kind"], match["name"]) if match else (where, "branch", "main")
    )


def _storage(address: str) -> "icechunk.Storage":
    """Return where a repository lies, with the same credentials as other remote stores."""
    import icechunk

    if not is_remote(address):
        return icechunk.local_filesystem_storage(str(local_path(address).resolve()))
    protocol, bucket, path, *_ = urlsplit(address)
    anonymous = bool(storage_options(address))
    options: dict[str, Any] = {"bucket": bucket, "prefix": path.strip("/")}
    options |= {"anonymous": True} if anonymous else {"from_env": True}
    if protocol == "gs":
        return icechunk.gcs_storage(**options)
    if protocol == "s3":
        options["region"] = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        server = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if server:
            is_plain = server.startswith("http:")
            options |= {"endpoint_url": server, "allow_http": is_plain, "force_path_style": True}
        return icechunk.s3_storage(**options)
    raise UserError(
        f"{redact_secrets(address)}: an Icechunk repository is read from a path, s3:// or gs://, "
        f"not {protocol}://. Change data.store."
    )


def _credentials(prefix: str) -> Any:
    """Return the credentials for virtual chunks, None if there are none."""
    import icechunk

    has_credentials = not storage_options(prefix)
    if prefix.startswith("s3://"):
        from_env = icechunk.s3_from_env_credentials()
        return from_env if has_credentials else icechunk.s3_anonymous_credentials()
    if prefix.startswith("gs://") and has_credentials:
        return icechunk.gcs_from_env_credentials()
    # Icechunk 2 has a word for each way to need none, instead of None.
    ways = {"file": "LocalFileSystemAccess", "http": "HttpAccess", "https": "HttpAccess"}
    return getattr(icechunk.credentials, ways.get(urlsplit(prefix).scheme, ""), None)


@final
class ReferenceStore(FsspecStore):
    """Kerchunk references by fsspec's file system for them, with the chunks of allowed folders."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._folders = allowed_folders(where)
        system = ReferenceFileSystem(
            _read_references(where),
            fs={name: system for folder in self._folders for name, system in _systems(folder)},
            asynchronous=True,
        )
        super().__init__(system, read_only=True, path="")

    async def get(
        self,
        key: str,
        prototype: BufferPrototype,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        """Read a key.

        Raises:
            UserError: its chunk is in a file that is not allowed.
        """
        if key.endswith("zarr.json") and isinstance(self.fs.references, LazyReferenceMapper):
            return None  # it would take the name for a chunk's number; its arrays are of format 2
        reference = self.fs.references.get(key)
        if isinstance(reference, (list, tuple)):
            check_allowed(reference[0] if reference else None, self.where, self._folders)
        return await super().get(key, prototype, byte_range)

    def allows(self, address: str) -> bool:
        """Whether the chunks of a file may be read."""
        return any(_is_inside(address, folder) for folder in self._folders)


def open_references(where: str) -> ReferenceStore:
    """Open kerchunk references, a JSON file or a folder of parquet files.

    Raises:
        UnreachableError: they are remote and the server does not answer.
    """
    try:
        import kerchunk  # noqa: F401 - its codecs are found by numcodecs

        return ReferenceStore(where)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"{redact_secrets(where)}: needs a package that is missing ({reason_of(error)}). "
            f"{install_extra('kerchunk')}."
        ) from error
    except Exception as error:
        if is_remote(where) and is_network_error(error):
            raise unreachable_error(where, reason_of(error)) from error
        raise UserError(
            f"{redact_secrets(where)}: not kerchunk references that can be read "
            f"({reason_of(error)}). Set data.store to a JSON file or a parquet folder of them."
        ) from error


def _read_references(where: str) -> Any:
    """Return the content of a JSON file, or a reader of a folder of parquet files.

    Raises:
        ValueError: it is no JSON, or its references are written as templates that make code run.
    """
    if not is_remote(where) and not local_path(where).exists():
        raise FileNotFoundError("there is no such file")
    system, path = filesystem(where) if is_remote(where) else (LocalFileSystem(), local_path(where))
    if not where.lower().endswith(".json"):
        return LazyReferenceMapper(str(path), fs=system, engine="pyarrow")
    content = json.loads(system.cat_file(str(path)))
    if not isinstance(content, dict):
        raise ValueError("it has no references")
    templates = content.get("templates") or {}
    if content.get("gen") or any("{" in str(text) for text in templates.values()):
        raise ValueError("its references are generated by templates")
    return content


def _systems(folder: str) -> Iterator[tuple[str | None, Any]]:
    """Yield file systems for the chunks of an allowed folder, with the protocols they are for."""
    if not is_remote(folder):
        local = AsyncFileSystemWrapper(LocalFileSystem(), asynchronous=True)
        yield from ((protocol, local) for protocol in (None, "file", "local"))
        return
    protocol = urlsplit(folder).scheme
    given = next(iter(storage_options(folder).values()), {})
    options = {"asynchronous": True, "skip_instance_cache": True, **given}
    system = fsspec.filesystem(protocol, **options)
    is_async = system.async_impl
    yield protocol, system if is_async else AsyncFileSystemWrapper(system, asynchronous=True)


def allowed_folders(where: str) -> list[str]:
    """Return the folders whose files may be read as chunks of a repository or a reference file."""
    listed = [text.strip() for text in os.environ.get(ALLOWED_FOLDERS, "").split(",")]
    if not is_remote(where):
        own = str(local_path(where).resolve().parent)
    else:
        parent = where.rstrip("/").rpartition("/")[0]
        own = where if parent.endswith("/") else parent  # a bucket has no folder above it
    return [own, *filter(None, listed)]


def check_allowed(address: object, where: str, folders: Sequence[str]) -> None:
    """Refuse chunks in a file or folder outside the allowed folders.

    Args:
        where: the repository or reference file that names it.
    """
    if isinstance(address, str) and any(_is_inside(address, folder) for folder in folders):
        return
    raise UserError(
        f"{redact_secrets(where)}: has chunks in {redact_secrets(str(address))}, but only files in "
        f"{redact_secrets(', '.join(folders))} are allowed. If you trust it, list their folder in "
        f"the environment variable {ALLOWED_FOLDERS}."
    )


def _is_inside(address: str, folder: str) -> bool:
    if is_remote(address) or is_remote(folder):
        climbs = ".." in unquote(address).replace("\\", "/").split("/")
        return not climbs and f"{address.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")
    # As fsspec finds the file, with all links followed.
    path = Path(fsspec.url_to_fs(address)[1]).resolve()
    return path.is_relative_to(local_path(folder).resolve())
