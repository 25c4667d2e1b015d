"""Files from the Hugging Face Hub, failing within seconds when it cannot be reached."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from transformers.utils import logging

from sekv.errors import BackboneError

_PROBE_SECONDS = 5.0
_MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")


@contextmanager
def quiet_progress() -> Iterator[None]:
    """Hides the progress bars of transformers and the Hub where there is no terminal to draw them on."""
    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def hub_snapshot(repo_id: str) -> Path:
    """The folder of a model from the Hub, or from the Hub's own cache when the Hub cannot be reached.

    Raises:
        BackboneError: the model does not exist, or the Hub cannot be reached and the model is not cached.
    """
    reason = _unreachable(repo_id)
    offline = reason is not None
    try:
        with quiet_progress():
            return Path(snapshot_download(repo_id, allow_patterns=list(_MODEL_FILES), local_files_only=offline))
    except LocalEntryNotFoundError as error:
        raise BackboneError(
            f"'{repo_id}' is not in the Hub's cache and the Hub cannot be reached ({reason or error}); "
            "connect to the network, or give a local folder"
        ) from error
    except Exception as error:  # HTTP clients differ between releases and share no base class
        raise BackboneError(f"downloading '{repo_id}' failed ({type(error).__name__}: {error}); try again") from error


def _unreachable(repo_id: str) -> str | None:
    """Why the Hub cannot serve `repo_id` now, or None; one request, because a download retries for minutes."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info(repo_id, timeout=_PROBE_SECONDS)
    except RepositoryNotFoundError as error:
        raise BackboneError(f"'{repo_id}' is not on the Hub, or private; check the spelling or log in") from error
    except Exception as error:  # as above
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
