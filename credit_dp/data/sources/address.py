"""Addresses of stores: local paths and fsspec URLs, patterns, credentials and network errors.

Credentials come from the environment only, and no message shows one: every text that may contain
an address passes `redact_secrets` first.
"""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from glob import glob, has_magic
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem

from credit_dp.checks import expand_home
from credit_dp.errors import UnreachableError, UserError, first_line, install_extra

LOCAL_PROTOCOLS = ("file", "local")
PROTOCOL = re.compile(r"([A-Za-z][\w+.-]*)(?:://|::)")
PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
STORE_OF_ZARR = re.compile(r" in store .+ at path ('.*?'|[^\s)]+)")  # with names of classes
QUERY = re.compile(r"(?<=\w)\?\S*")
# With one of these set, the libraries find credentials by themselves; else access is anonymous.
GOOGLE = ("GOOGLE_APPLICATION_CREDENTIALS",)
AMAZON = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
# Packages whose exceptions mean that the network failed or that access was refused.
NETWORK = (
    "aiobotocore",
    "aiohttp",
    "botocore",
    "ftplib",
    "gcsfs",
    "google",
    "paramiko",
    "requests",
    "urllib3",
)
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def is_remote(where: str) -> bool:
    """Whether `where` is a URL rather than a path on this machine."""
    protocols = _protocols(where)
    return bool(protocols) and not (len(protocols) == 1 and protocols[0] in LOCAL_PROTOCOLS)


def local_path(where: str) -> Path:
    """Return the path of a local store, given as a path or as `file://...`."""
    for protocol in LOCAL_PROTOCOLS:
        where = where.removeprefix(f"{protocol}://")
    return expand_home("data.store", where)


def absolute_address(where: str) -> str:
    """Return an address that is valid in every working folder."""
    outer, chain, inner = where.rpartition("::")  # of an archive, such as zip::file://era5.zip
    if is_remote(inner):
        return where
    path = str(local_path(inner).absolute())
    return f"{outer}::file://{path}" if chain else path


def check_address(where: str) -> None:
    """Refuse an address that carries credentials, or that can be none.

    Raises:
        UserError: it has a user, a password or a query; the message shows none of them. It has
            control characters, or a path that the system refuses.
    """
    if CONTROL.search(where):
        raise UserError(f"data.store: needs an address in one line, got {redact_secrets(where)!r}")
    try:
        if not is_remote(where):
            local_path(where).exists()
    except OSError as error:  # too long, or in a folder of others
        raise UserError(
            f"{where}: not an address that can be read ({error.strerror}). Change data.store."
        ) from error
    # A signed URL has its key in the query.
    signed = where.startswith(("http://", "https://")) and "?" in where
    if is_remote(where) and (PASSWORD.search(where) or signed):
        raise UserError(
            f"{redact_secrets(where)}: an address can't hold a user, a password or a query; "
            "credentials come from the environment. Change data.store."
        )


def redact_secrets(text: str) -> str:
    """Remove passwords, URL queries and keys of the environment from the text of a message."""
    # An address may stand anywhere in an error message of a library.
    text = QUERY.sub("?...", PASSWORD.sub("...@", text)) if "://" in text else text
    for name in SECRETS:
        if os.environ.get(name):
            text = text.replace(os.environ[name], f"${name}")
    return text


def storage_options(where: str) -> dict[str, dict[str, Any]]:
    """Return fsspec's options by protocol: anonymous access unless the environment has credentials.

    `simplecache::s3://bucket` needs `{"s3": {"anon": True}}`.
    """
    anonymous: Mapping[str, dict[str, Any]] = {
        "s3": {"anon": not _any_set(AMAZON)},
        "gs": {} if _any_set(GOOGLE) else {"token": "anon"},
    }
    canonical = {"s3a": "s3", "gcs": "gs"}
    by_protocol = {
        protocol: anonymous.get(canonical.get(protocol, protocol), {})
        for protocol in _protocols(where)
    }
    return {protocol: options for protocol, options in by_protocol.items() if options}


def filesystem(where: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a remote address and the path in it.

    Raises:
        UserError: the protocol is unknown, a package for it is missing, or there is no such file.
        UnreachableError: the server of a protocol that connects here, as FTP, can't be reached.
    """
    try:
        system, path = fsspec.url_to_fs(where, **storage_options(where))
    except ImportError as error:
        raise UserError(
            f"{redact_secrets(where)}: needs a package that is missing "
            f"({first_line(error)}). {install_extra('remote')}."
        ) from error
    except Exception as error:  # some connect to a server here, or open a file
        if is_network_error(error):
            raise unreachable_error(where, reason_of(error)) from error
        raise UserError(
            f"{redact_secrets(where)}: not an address that can be read "
            f"({first_line(error)}). Change data.store."
        ) from error
    return system, str(path)


def expand_pattern(where: str) -> list[str]:
    """Return the sorted addresses that match a pattern with `*`, `?` or `[...]`.

    An address without a pattern is returned as it is, and so is a local path that exists under
    the very name of the pattern.
    """
    check_address(where)
    if not has_magic(where) or (not is_remote(where) and local_path(where).exists()):
        return [where]
    if not is_remote(where):
        matches = sorted(glob(str(local_path(where)), recursive=True))
    else:
        system, pattern = filesystem(where)
        try:
            matches = sorted(str(system.unstrip_protocol(path)) for path in system.glob(pattern))
        except Exception as error:
            if is_network_error(error):
                raise unreachable_error(where, reason_of(error)) from error
            raise UserError(
                f"{redact_secrets(where)}: can't be listed ({reason_of(error)}). Give the stores "
                "one by one in data.store."
            ) from error
    if not matches:
        place = redact_secrets(absolute_address(where))
        raise UserError(f"{place}: no store fits this pattern. Change data.store.")
    return matches


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, without secrets and zarr's stores, for a message."""
    return redact_secrets(STORE_OF_ZARR.sub("", first_line(error)))


def zarr_open_error(where: str, error: BaseException) -> UserError:
    """Return the error for a zarr store that can't be opened or can't be reached."""
    if is_remote(where) and is_network_error(error):
        return unreachable_error(where, reason_of(error))
    return UserError(
        f"{redact_secrets(where)}: not a zarr group that can be read ({reason_of(error)}). "
        "Set data.store to one."
    )


def unreachable_error(where: str, reason: str) -> UnreachableError:
    """Return the error for a remote store that does not answer."""
    return UnreachableError(
        f"{redact_secrets(where)}: can't be reached from here ({reason}). Check the network "
        "and the credentials in the environment, or change data.store."
    )


def is_network_error(error: BaseException) -> bool:
    """Whether the network or the access rights failed, rather than the store being absent."""
    for cause in _error_chain(error):
        package = type(cause).__module__.partition(".")[0]
        if package in NETWORK or (isinstance(cause, OSError) and not isinstance(cause, ABSENT)):
            return True
    return False


def check_host(where: str) -> None:
    """Refuse an address whose host name can't be resolved: libraries would retry for minutes.

    The check is skipped where a proxy or fsspec's own settings may lead to another host.

    Raises:
        UnreachableError: the host name can't be resolved.
    """
    host = _certain_host(where)
    protocol = (_protocols(where) or [""])[-1]
    if host is None or _any_set(PROXIES) or fsspec.config.conf.get(protocol):
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise unreachable_error(where, f"{host}: {error.strerror or error}") from error


def _certain_host(where: str) -> str | None:
    """Return the host that an address leads to; None if settings may choose another one."""
    protocol = (_protocols(where) or [""])[-1]
    if protocol in ("http", "https"):
        return urlsplit(where.rpartition("::")[2]).hostname
    if protocol in ("gs", "gcs") and not _any_set(("STORAGE_EMULATOR_HOST",)):
        return "storage.googleapis.com"
    # A profile or an endpoint may lead to any S3 server.
    custom_endpoints = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", *AMAZON)
    if protocol in ("s3", "s3a") and not _any_set(custom_endpoints):
        return "s3.amazonaws.com"
    return None


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    # `raise ... from` can build a chain that leads back to itself.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _protocols(where: str) -> list[str]:
    """Return the protocols of an address, outermost first; none for a path.

    `simplecache::s3://bucket` has `["simplecache", "s3"]`.
    """
    return PROTOCOL.findall(where)


def _any_set(names: tuple[str, ...]) -> bool:
    return any(os.environ.get(name) for name in names)


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, by which its format is known."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise UserError(
            f"{path.absolute()}: can't be read ({error.strerror}). Give another path, or change "
            "the file's permissions."
        ) from error
