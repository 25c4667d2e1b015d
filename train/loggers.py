"""Where the curves of a run go: CSV always, wandb online or offline; a resumed run stays the same wandb run."""

from __future__ import annotations

import json
import netrc
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from sekv.evaluation.records import replacing

_RUN_FILE = "wandb-run.json"
_PROJECT = "sekv"


@dataclass(frozen=True)
class WandbRun:
    """Which wandb run the steps of a training run belong to.

    Attributes:
        id: unique within the project.
        offline: nothing is sent; `wandb sync` does it later.
    """

    id: str
    offline: bool

    def save(self, run_dir: Path) -> None:
        """Keeps it in the run's folder, for a run that resumes."""
        with replacing(run_dir / _RUN_FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, run_dir: Path) -> WandbRun | None:
        """The one that was kept, or None where there is none or it cannot be read."""
        try:
            return cls(**json.loads((run_dir / _RUN_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def run_loggers(run_dir: Path, resuming: bool = False) -> tuple[list[Logger], WandbRun | None]:
    """CSV always; wandb too unless WANDB_MODE=disabled: offline without an account, never asking, never waiting.

    A run that resumes goes on in the same wandb run, with its steps and configuration, and offline if it began so;
    WANDB_MODE overrides that.

    Args:
        run_dir: the run's folder.
        resuming: go on where an earlier run of that folder stopped.

    Returns:
        The loggers, and which wandb run it is, if any.
    """
    loggers: list[Logger] = [CSVLogger(run_dir, name="csv")]
    mode = os.environ.get("WANDB_MODE", "")
    if mode == "disabled":
        return loggers, None
    earlier = WandbRun.load(run_dir) if resuming else None
    if mode in ("offline", "dryrun"):
        offline = True
    elif mode == "online":
        offline = False
    else:
        offline = earlier.offline if earlier is not None else not _logged_in_to_wandb()
    if offline:  # nothing to tell: no address, no account
        os.environ.setdefault("WANDB_SILENT", "true")
    run = WandbRun(earlier.id if earlier is not None else _new_id(), offline)
    loggers.append(WandbLogger(name=run_dir.name, save_dir=run_dir, project=_PROJECT, id=run.id, offline=offline))
    return loggers, run


def finish_wandb(loggers: Iterable[Logger]) -> None:
    """Closes this process's wandb run, if one has begun."""
    if any(isinstance(logger, WandbLogger) for logger in loggers):
        import wandb

        if wandb.run is not None:  # asking the logger would begin a run where none has begun
            wandb.finish()


def _new_id() -> str:
    from wandb.sdk.lib.runid import generate_id

    return generate_id()


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):  # no such file, or not one to be read
        return False
