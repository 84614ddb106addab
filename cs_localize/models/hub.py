"""Models of the Hugging Face hub: from the local cache if they are there, else from the hub."""

from __future__ import annotations

import logging
from pathlib import Path

from cs_localize.errors import UsageError
from cs_localize.models.extras import need
from cs_localize.models.files import what_is_missing

_LOG = logging.getLogger("cs_localize")
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_UNWANTED = ["*/*", "consolidated*"]  # other forms of the same weights


def fetch(name: str, revision: str | None = None) -> Path:
    """The directory of a hub model in the local hub cache, downloaded unless it is there and complete.

    No network is used for a model that the cache holds. Without a revision that is whatever the cache's ``main`` is.

    Args:
        name: ``organisation/model``.
        revision: branch, tag or commit; ``main`` if None.

    Raises:
        UsageError: if it can be had neither there nor here, or has no safetensors weights.
    """
    need(f"the hub model '{name}'", "huggingface_hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        cached = Path(snapshot_download(name, revision=revision, local_files_only=True))
        if what_is_missing(cached) is None:
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        raise UsageError(f"'{name}' is not a hub id; write it as organisation/model") from None
    _LOG.info("fetching %s from the hub", name)
    fetched = _download(name, revision)
    missing = what_is_missing(fetched)
    if missing:
        raise UsageError(
            f"'{name}' lacks {missing}, as far as it could be fetched: the hub model has none, or the hub cannot be "
            "reached; choose a model with safetensors weights, or connect"
        )
    return fetched


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except errors.GatedRepoError:
        reason = "it is gated: accept its terms on its page and log in with 'hf auth login'"
    except errors.RevisionNotFoundError:
        reason = f"it has no revision '{revision}'"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private: check the spelling, or log in with 'hf auth login'"
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        reason = "the hub cannot be reached, and the local hub cache does not hold all of it: give a directory instead"
    except (errors.HfHubHTTPError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise UsageError(f"'{name}' cannot be fetched: {reason}")
