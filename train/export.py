"""From a training checkpoint to an adapter folder that the library loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sekv.adapter import CONFIG_NAME, WEIGHTS_NAME, SeKVAdapter, SeKVConfig, read_adapter_config
from sekv.errors import AdapterError
from sekv.evaluation.records import replacing
from sekv.hub import push_folder
from train.card import CARD_NAME, model_card, read_results, without_folders
from train.module import ADAPTER_KEY

_PREFIX = "adapter."


def export_checkpoint(
    checkpoint: str | Path, directory: str | Path, *, name: str | None = None, results: str | Path | None = None
) -> Path:
    """Writes adapter_config.json, adapter_model.safetensors and a model card; it needs no backbone and no network.

    Args:
        checkpoint: a file written by `sekv train`; nothing in it is executed.
        directory: created when missing.
        name: what the card calls the adapter; the directory when None.
        results: a results.json of `sekv evaluate`, for the card.

    Returns:
        The directory.

    Raises:
        AdapterError: the checkpoint is missing, corrupt, or was written by something else.
        DataError: so are the results.
    """
    path = Path(checkpoint)
    adapter, content = read_checkpoint(path)
    figures = read_results(Path(results)) if results is not None else []
    facts = {
        "steps": content["global_step"],
        "backbone": content["hyper_parameters"]["backbone"],
        "hyper_parameters": content["hyper_parameters"],
        "data": without_folders(content[ADAPTER_KEY].get("data") or {}),
        "parameters": adapter.num_parameters,
        "metrics": content[ADAPTER_KEY]["metrics"],
    }
    folder = adapter.save_pretrained(directory, extra=facts)
    with replacing(folder / CARD_NAME) as temporary:
        temporary.write_text(model_card(read_adapter_config(folder), name or str(directory), figures), encoding="utf-8")
    return folder


def push_adapter(folder: Path, repo_id: str, private: bool = False) -> str:
    """Uploads an exported adapter and its card to the Hub.

    Returns:
        The address of the repository.

    Raises:
        AdapterError: the Hub refuses or breaks off; the folder stays complete.
    """
    training = read_adapter_config(folder)["training"]
    message = f"Adapter after {training['steps']} steps"
    return push_folder(folder, repo_id, (CONFIG_NAME, WEIGHTS_NAME, CARD_NAME), message, private, AdapterError)


def read_checkpoint(path: Path) -> tuple[SeKVAdapter, Mapping[str, Any]]:
    """The adapter of a training checkpoint, and all of its content.

    Raises:
        AdapterError: the checkpoint is missing, corrupt, or was written by something else.
    """
    content = _load(path)
    missing = [key for key in (ADAPTER_KEY, "state_dict", "global_step", "hyper_parameters") if key not in content]
    if missing:
        raise AdapterError(f"{path} is not a training checkpoint of sekv: it lacks {', '.join(missing)}")
    facts = content[ADAPTER_KEY]
    try:
        shape = facts["fingerprint"]
        adapter = SeKVAdapter(
            shape["compressible"],
            shape["num_heads"],
            shape["num_kv_heads"],
            shape["head_dim"],
            SeKVConfig(**facts["config"]),
            shape,
            facts["backbone_parameters"],
        )
        adapter.load_state_dict({name.removeprefix(_PREFIX): t for name, t in content["state_dict"].items()})
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise AdapterError(f"{path} does not hold a complete adapter of this version of sekv: {reason}") from None
    broken = [name for name, parameter in adapter.named_parameters() if not bool(parameter.isfinite().all())]
    if broken:
        raise AdapterError(
            f"{path} holds values that are not finite in {', '.join(broken)}; export an earlier checkpoint"
        )
    return adapter, content


def _load(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        raise AdapterError(f"{path} is a folder; give a checkpoint, such as runs/NAME/checkpoints/best.ckpt")
    if not path.is_file():
        raise AdapterError(f"{path} does not exist; `sekv train` writes checkpoints under runs/NAME/checkpoints")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None
    except Exception:  # foreign bytes break the reader in many ways; what torch advises then is to execute them
        raise AdapterError(
            f"{path} is not a training checkpoint of sekv, or it is damaged or truncated; give a file that "
            "`sekv train` wrote"
        ) from None
    if not isinstance(content, Mapping):
        raise AdapterError(f"{path} is not a training checkpoint of sekv: it holds {type(content).__name__}")
    return content
