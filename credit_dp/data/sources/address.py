"""Where a store is: a path of this machine or an address that fsspec knows, and with what rights.

Credentials come from the environment only, and no message shows one.
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
from credit_dp.errors import UnreachableError, UserError

LOCAL_PROTOCOLS = ("file", "local")  # protocols of paths on this machine
PROTOCOL = re.compile(r"([A-Za-z][\w+.-]*)(?:://|::)")
PASSWORD = re.compile(r"(?<=://)[^/@\s]*@")
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
# Packages whose errors are of the network or of the rights on the other side, and what is absent.
NETWORK = (
    "aiobotocore",
    "aiohttp",
    "botocore",
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
    """Whether `where` is an address, not a path of this machine."""
    protocols = _protocols(where)
    return bool(protocols) and not (len(protocols) == 1 and protocols[0] in LOCAL_PROTOCOLS)


def local_path(where: str) -> Path:
    """The path of a store on this machine, given as such or as `file://`.

    Raises:
        UserError: it begins with the home folder of nobody.
    """
    for protocol in LOCAL_PROTOCOLS:
        where = where.removeprefix(f"{protocol}://")
    return expand_home("data.store", where)


def absolute_address(where: str) -> str:
    """The address of a store that is the same in every folder.

    Raises:
        UserError: it begins with the home folder of nobody.
    """
    return where if is_remote(where) else str(local_path(where).absolute())


def check_address(where: str) -> None:
    """Refuse an address that carries credentials.

    Raises:
        UserError: it has a user, a password or a query; the message shows none of them.
    """
    signed = where.startswith(("http://", "https://")) and "?" in where
    if is_remote(where) and (PASSWORD.search(where) or signed):
        raise UserError(
            f"{redact_secrets(where)}: an address can't hold a user, a password or a query; "
            "credentials come from the environment. Change data.store."
        )


def redact_secrets(text: str) -> str:
    """Text of a message without passwords and queries of addresses or keys of the environment."""
    text = QUERY.sub("?...", PASSWORD.sub("...@", text)) if "://" in text else text
    for name in SECRETS:
        if os.environ.get(name):
            text = text.replace(os.environ[name], f"${name}")
    return text


def storage_options(where: str) -> dict[str, dict[str, Any]]:
    """What fsspec is told for each protocol of an address: anonymous, unless the environment
    has credentials."""
    anonymous: Mapping[str, dict[str, Any]] = {
        "s3": {"anon": not _any_set(AMAZON)},
        "gs": {} if _any_set(GOOGLE) else {"token": "anon"},
    }
    same = {"s3a": "s3", "gcs": "gs"}
    found = {name: anonymous.get(same.get(name, name), {}) for name in _protocols(where)}
    return {name: options for name, options in found.items() if options}


def filesystem(where: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a remote address, and the path in it.

    Raises:
        UserError: the protocol is unknown, or a package for it is missing.
    """
    try:
        system, path = fsspec.url_to_fs(where, **storage_options(where))
    except ImportError as error:
        raise UserError(
            f"{redact_secrets(where)}: needs a package that is missing "
            f"({_first_line(error)}). Install it: pip install 'credit_dp[remote]'"
        ) from error
    except ValueError as error:
        raise UserError(
            f"{redact_secrets(where)}: not an address that can be read "
            f"({_first_line(error)}). Change data.store."
        ) from error
    return system, str(path)


def expand_pattern(where: str) -> list[str]:
    """The addresses that a pattern with `*`, `?` or `[...]` stands for, sorted; one without is
    itself.

    Raises:
        UserError: nothing is there, or what is there can't be listed.
    """
    check_address(where)
    if not has_magic(where) or (not is_remote(where) and local_path(where).exists()):
        return [where]
    if not is_remote(where):
        found = sorted(glob(str(local_path(where)), recursive=True))
    else:
        system, pattern = filesystem(where)
        try:
            found = sorted(str(system.unstrip_protocol(path)) for path in system.glob(pattern))
        except Exception as error:
            if is_network_error(error):
                raise unreachable_error(where, reason_of(error)) from error
            raise UserError(
                f"{redact_secrets(where)}: can't be listed ({reason_of(error)}). Give the stores "
                "one by one in data.store."
            ) from error
    if not found:
        raise UserError(f"{where}: no store fits this pattern. Change data.store.")
    return found


def reason_of(error: BaseException) -> str:
    """What went wrong, as the part of a line that a message can show."""
    return redact_secrets(_first_line(error))


def zarr_open_error(where: str, error: BaseException) -> UserError:
    """What to say of a zarr store that can't be opened: it is none, or can't be reached."""
    if is_remote(where) and is_network_error(error):
        return unreachable_error(where, reason_of(error))
    return UserError(
        f"{redact_secrets(where)}: not a zarr group that can be read ({reason_of(error)}). "
        "Set data.store to one."
    )


def unreachable_error(where: str, reason: str) -> UnreachableError:
    """What to say of a store elsewhere of which nothing is known."""
    return UnreachableError(
        f"{redact_secrets(where)}: can't be reached from here ({reason}). Look at the network and "
        "at the credentials in the environment, or change data.store."
    )


def is_network_error(error: BaseException) -> bool:
    """Whether nobody answered, or nothing may be read, rather than that something is not there."""
    for each in _error_chain(error):
        package = type(each).__module__.partition(".")[0]
        if package in NETWORK or (isinstance(each, OSError) and not isinstance(each, ABSENT)):
            return True
    return False


def check_host(where: str) -> None:
    """Refuse an address whose host has no name here, which libraries try again for minutes.

    Only what is certain is refused: not where a proxy or settings of fsspec lead elsewhere.

    Raises:
        UnreachableError: the name is not known here.
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
    """The host that an address leads to, if that is certain."""
    protocol = (_protocols(where) or [""])[-1]
    if protocol in ("http", "https"):
        return urlsplit(where.rpartition("::")[2]).hostname
    if protocol in ("gs", "gcs") and not _any_set(("STORAGE_EMULATOR_HOST",)):
        return "storage.googleapis.com"
    elsewhere = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", *AMAZON)
    if protocol in ("s3", "s3a") and not _any_set(elsewhere):
        return "s3.amazonaws.com"
    return None


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and all that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _protocols(where: str) -> list[str]:
    """`simplecache::s3://bucket` -> `["simplecache", "s3"]`; none for a path."""
    return PROTOCOL.findall(where)


def _any_set(names: tuple[str, ...]) -> bool:
    return any(os.environ.get(name) for name in names)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
