"""Models on the Hugging Face hub: fetched by `huggingface_hub`, and described as the hub reads it.

A repository there is a folder with one exported file and its card as README.md.
"""

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from credit_dp.errors import UserError, first_line

SCHEME = "hf://"
SUFFIX = ".safetensors"


def fetch_model(address: str) -> Path:
    """Return the local folder, or file, of `hf://OWNER/NAME[@REVISION][/FILE]`.

    Only tensors are fetched, into the hub's cache; without a network the cache alone answers.

    Raises:
        UserError: huggingface_hub is not installed, or there is no such repository or file.
    """
    try:
        from huggingface_hub import constants, hf_hub_download, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"{address}: needs huggingface_hub, which is not installed. "
            "Run pip install huggingface_hub."
        ) from None
    owner, _, rest = address.removeprefix(SCHEME).partition("/")
    name, _, file = rest.partition("/")
    name, _, revision = name.partition("@")
    # Not every release of huggingface_hub checks that a file or revision stays in its cache.
    leaves = file.startswith("/") or {".", ".."} & {revision, *re.split(r"[/\\]", file)}
    if not owner or not name or leaves or not address.isprintable():
        address = address if address.isprintable() else repr(address)
        raise UserError(
            f"{address}: needs hf://OWNER/NAME, hf://OWNER/NAME@REVISION or a file there."
        )
    repository = f"{owner}/{name}"
    version = revision or None
    try:
        if file:
            return Path(hf_hub_download(repository, file, revision=version))
        return Path(
            snapshot_download(
                repository,
                revision=version,
                allow_patterns=f"*{SUFFIX}",
                # Some releases ask the hub for a commit that is in the cache, even in offline mode.
                local_files_only=constants.HF_HUB_OFFLINE,
            )
        )
    # ValueError: other names that no file can have.
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(
            f"{address}: could not be fetched ({first_line(error)}). Change the address, log in "
            "with `hf auth login`, or fetch it where there is a network."
        ) from None


def exported_file_in(folder: Path) -> Path | None:
    """Return the exported file of a folder that holds one and no checkpoint; None otherwise.

    Raises:
        UserError: it holds several.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files or (folder / "state.json").exists() or (folder / "checkpoint").exists():
        return None
    if len(files) > 1:
        raise UserError(
            f"{folder}: needs one exported model, got {', '.join(file.name for file in files)}. "
            "Give the path of one of them."
        )
    return files[0]


def card_metadata(name: str, scores: dict[str, Any] | None) -> str:
    """Return what the hub reads of a card: a block of YAML with the scores.

    Source: https://huggingface.co/docs/hub/model-cards
    """
    metadata: dict[str, Any] = {
        "library_name": "credit_dp",
        "tags": ["weather-forecasting", "climate", "pytorch"],
    }
    if scores is not None:
        results = [
            {
                "task": {"type": "weather-forecasting", "name": "Weather forecasting"},
                "dataset": {"type": "held-out", "name": f"held-out dates, {lead}"},
                "metrics": [
                    {"type": "rmse", "name": f"RMSE of {channel}", "value": errors["model"]}
                ],
            }
            for channel, leads in scores["rmse"].items()
            for lead, errors in leads.items()
        ]
        metadata["model-index"] = [{"name": name, "results": results}]
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---"
