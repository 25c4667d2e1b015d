"""Files from the Hugging Face Hub, failing within seconds when it cannot be reached."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, LocalTokenNotFoundError, RepositoryNotFoundError
from transformers.utils import logging

from sekv.errors import BackboneError, SeKVError

_PROBE_SECONDS = 5.0
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
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


def is_hub_id(name: str) -> bool:
    """Whether a name can stand for a repository on the Hub, such as `org/name`."""
    return _HUB_ID.fullmatch(name) is not None and not name.startswith(".")


def hub_snapshot(repo_id: str, files: Sequence[str] = _MODEL_FILES, kind: type[SeKVError] = BackboneError) -> Path:
    """A folder with files from the Hub, or from the Hub's own cache when the Hub cannot be reached.

    Args:
        repo_id: such as `org/name`.
        files: patterns of the files that are wanted.
        kind: class of the error.

    Raises:
        SeKVError: of that kind; the repository does not exist, or the Hub cannot be reached and it is not cached.
    """
    reason = _unreachable(repo_id, kind)
    offline = reason is not None
    try:
        with quiet_progress():
            return Path(snapshot_download(repo_id, allow_patterns=list(files), local_files_only=offline))
    except LocalEntryNotFoundError as error:
        raise kind(
            f"'{repo_id}' is not in the Hub's cache and the Hub cannot be reached ({reason or error}); "
            "connect to the network, or give a local folder"
        ) from error
    except Exception as error:  # HTTP clients differ between releases and share no base class
        raise kind(f"downloading '{repo_id}' failed ({type(error).__name__}: {error}); try again") from error


def _unreachable(repo_id: str, kind: type[SeKVError]) -> str | None:
    """Why the Hub cannot serve `repo_id` now, or None; one request, because a download retries for minutes."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        HfApi().model_info(repo_id, timeout=_PROBE_SECONDS)
    except RepositoryNotFoundError as error:
        raise kind(f"'{repo_id}' is not on the Hub, or private; check the spelling or log in") from error
    except Exception as error:  # as above
        return _first_line(error)
    return None


def check_hub_access(repo_id: str, kind: type[SeKVError]) -> None:
    """Refuses an upload that must fail: a malformed name, no account, no network.

    Raises:
        SeKVError: of that kind.
    """
    if not is_hub_id(repo_id):
        raise kind(f"'{repo_id}' is no name for the Hub; give ORGANISATION/NAME")
    if constants.HF_HUB_OFFLINE:
        raise kind("nothing can be pushed to the Hub while HF_HUB_OFFLINE is set")
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError as error:
        raise kind("nobody is logged in to the Hub; run `hf auth login`, or set HF_TOKEN") from error
    except Exception as error:  # as above
        raise kind(f"the Hub does not let you in ({_first_line(error)}); run `hf auth login` and try again") from error


def push_folder(
    folder: Path, repo_id: str, files: Sequence[str], message: str, private: bool, kind: type[SeKVError]
) -> str:
    """Uploads files of a folder as one commit to a repository, which is made when it is missing.

    Args:
        folder: where the files are.
        repo_id: such as `org/name`.
        files: their names.
        message: of the commit.
        private: for a new repository: only its owners see it.
        kind: class of the error.

    Returns:
        The address of the repository.

    Raises:
        SeKVError: of that kind; the Hub refuses or breaks off.
    """
    api = HfApi()
    try:
        with quiet_progress():
            address = api.create_repo(repo_id, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=folder, allow_patterns=list(files), commit_message=message)
    except Exception as error:  # as above
        raise kind(f"pushing to '{repo_id}' failed ({_first_line(error)}); {folder} is complete, try again") from error
    return str(address)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
