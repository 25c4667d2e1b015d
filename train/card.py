"""The model card of an exported adapter: what it is for, what it was trained on, what it reached."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import ModelCardData

from sekv.backbone import DEFAULT_BACKBONE
from sekv.default_backbone import DEFAULT_REPOSITORY
from sekv.errors import DataError
from sekv.evaluation.records import Result
from sekv.evaluation.report import budget_label, format_bytes, how_compressed
from sekv.hub import is_hub_id

CARD_NAME = "README.md"
_FIGURES = {
    "val/loss": ("loss", "{:.3f}"),
    "val/logits": ("KL to the full cache, nats per token", "{:.3f}"),
    "val/attention": ("KL of attention by row, nats", "{:.3f}"),
    "val/expansion": ("share of spans zoomed into", "{:.1%}"),
    "val/rank": ("effective rank of a span", "{:.1f}"),
    "val/rows": ("rows attended", "{:.0f}"),
    "val/recall_learned": ("teacher's span mass covered by this router", "{:.1%}"),
    "val/recall_mean": ("the same, by the untrained inner product at equal rows", "{:.1%}"),
    "val/recall_oracle": ("the same, by the teacher's own order at equal rows", "{:.1%}"),
}


def model_card(payload: Mapping[str, Any], name: str, results: Sequence[Result] = ()) -> str:
    """The card in Markdown, with the header that the Hub reads.

    Args:
        payload: content of adapter_config.json.
        name: what the adapter is called: its folder, or its Hub id.
        results: of an evaluation of this adapter.
    """
    training = payload["training"]
    backbone = _published_name(str(training["backbone"]))
    header = ModelCardData(
        library_name="sekv",
        base_model=backbone if is_hub_id(backbone) else None,
        base_model_relation="adapter" if is_hub_id(backbone) else None,
        tags=["sekv", "kv-cache-compression", "long-context"],
    )
    parts = [
        f"---\n{header.to_yaml()}\n---",
        f"# {PurePath(name).name}",
        f"A SeKV adapter: the routers and the rank gate that compress the key-value cache of `{backbone}`, which stays "
        "frozen and is not part of this repository ([SeKV](https://arxiv.org/abs/2606.31145)).",
        _use(name, training["backbone"] if training["backbone"] == DEFAULT_BACKBONE else backbone),
        _table("Training", _training_rows(payload, backbone)),
        _table(f"Figures on held-out documents, budget {_share(training)}", _figure_rows(training["metrics"])),
    ]
    if results:
        parts.append(_results(results))
    parts.append(
        "## Limits\n\nThe adapter fits the backbone it was trained for; loading it over another is refused. "
        "Rows count everything that a query may attend to: sinks, anchors, summaries, tail and zoomed rows."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def read_results(path: Path) -> list[Result]:
    """The results.json of `sekv evaluate`.

    Raises:
        DataError: it is missing, or something else.
    """
    try:
        return [Result(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give the results.json of `sekv evaluate`") from None
    except (ValueError, TypeError):
        raise DataError(f"{path} is not a results.json of this version of `sekv evaluate`") from None


def without_folders(data: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a data module for the world to see: names of files, not where they lie on somebody's disk."""

    def bare(value: Any) -> Any:
        if isinstance(value, list):
            return [bare(item) for item in value]
        return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value

    return {name: bare(value) for name, value in data.items()}


def _published_name(backbone: str) -> str:
    """The Hub id of the embedded default, and the last part of a local folder."""
    if backbone == DEFAULT_BACKBONE:
        return DEFAULT_REPOSITORY
    return backbone if is_hub_id(backbone) and not Path(backbone).exists() else PurePath(backbone).name


def _use(name: str, backbone: str) -> str:
    return (
        "## Use\n\n```\nsekv generate --policy sekv "
        f"--backbone {backbone} --adapter {name} --budget 0.1 \\\n"
        '    --context-file notes.txt --question "Who called?"\n```\n\n'
        "```python\nfrom sekv.adapter import SeKVAdapter\nfrom sekv.backbone import load_backbone\n\n"
        f'backbone = load_backbone("{backbone}")\nadapter = SeKVAdapter.from_pretrained("{name}", backbone)\n```'
    )


def _share(training: Mapping[str, Any]) -> str:
    return budget_label(training["hyper_parameters"]["val_budget"])


def _training_rows(payload: Mapping[str, Any], backbone: str) -> list[tuple[str, str]]:
    training, config = payload["training"], payload["config"]
    settings = training["hyper_parameters"]
    data = dict(training.get("data") or {})
    count, whole = training["parameters"], payload["backbone_parameters"]
    return [
        ("backbone", backbone),
        ("trained parameters", f"{count:,}" + (f" ({count / whole:.3%} of the backbone)" if whole else "")),
        ("steps, end to end", f"{training['steps']:,}"),
        *((f"warm start: {key}", str(value)) for key, value in dict(settings.get("warm_start") or {}).items()),
        ("documents", str(data.pop("class_path", "unknown")).rpartition(".")[2]),
        *((f"documents: {key}", str(value)) for key, value in data.items() if value is not None),
        ("budgets", ", ".join(map(budget_label, settings["budgets"]))),
        ("query window", f"{settings['query_window']} tokens"),
        ("learning rate", f"{settings['lr']:g}"),
        ("precision of the backbone", str(settings["dtype"])),
        *((f"adapter: {key}", str(value)) for key, value in config.items()),
        ("sekv", str(payload["sekv_version"])),
    ]


def _figure_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(label, form.format(metrics[key])) for key, (label, form) in _FIGURES.items() if key in metrics]


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {label} | {value.replace('|', '/')} |" for label, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


def _results(results: Sequence[Result]) -> str:
    lines = [
        f"| {r.task} | {r.policy} | {budget_label(r.budget)} | {r.n} | {r.score:.1f} ± {r.score_stderr:.1f} "
        f"| {r.rows:.0f} | {format_bytes(r.resident_bytes)} | {format_bytes(r.moved_bytes_per_token)} |"
        for r in results
    ]
    head = "| task | policy | budget | samples | score | rows | resident | moved per token |"
    title = f"## Evaluation, {how_compressed(results[0].query_aware)}"
    return "\n".join([title, "", head, "|" + "---|" * 8, *lines])
