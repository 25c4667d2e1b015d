"""The model card: what the Hub reads, what people read, and nothing of where files lie on a disk."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import yaml

from sekv.errors import DataError
from sekv.evaluation.records import Result
from train.card import model_card, read_results, without_folders

RESULT = Result("sekv", "niah:2048", 0.1, False, 8, 87.5, 12.5, 62.5, 100.0, 204.0, 4.7e6, 69e6, 610e3, 1.0, 0, 2048.0)


def payload(backbone="Qwen/Qwen3-8B", **training):
    facts = {
        "steps": 3000,
        "backbone": backbone,
        "hyper_parameters": {
            "val_budget": 0.1,
            "budgets": [0.1, 0.2],
            "query_window": 128,
            "lr": 1e-3,
            "dtype": "bfloat16",
            "warm_start": {"documents": 6, "steps": 600},
        },
        "data": {"class_path": "train.data.RedPajama", "length": 8192, "column": None},
        "parameters": 3_540_000,
        "metrics": {"val/loss": 1.25, "val/logits": 0.0417, "val/recall_learned": 0.31, "train/loss": 9.0},
        **training,
    }
    return {
        "config": {"routing_dim": 24},
        "backbone_parameters": 8_190_735_360,
        "sekv_version": "0.1.0",
        "training": facts,
    }


def header(card):
    return yaml.safe_load(card.split("---")[1])


def test_the_card_says_what_it_is_and_where_it_comes_from():
    card = model_card(payload(), "me/my-adapter")
    assert header(card) == {
        "library_name": "sekv",
        "base_model": "Qwen/Qwen3-8B",
        "base_model_relation": "adapter",
        "tags": ["sekv", "kv-cache-compression", "long-context"],
    }
    for line in (
        "# my-adapter",
        "| backbone | Qwen/Qwen3-8B |",
        "| trained parameters | 3,540,000 (0.043% of the backbone) |",
        "| steps, end to end | 3,000 |",
        "| warm start: documents | 6 |",
        "| documents | RedPajama |",
        "| documents: length | 8192 |",
        "| budgets | 10%, 20% |",
        "| adapter: routing_dim | 24 |",
        "budget 10%",
        "| loss | 1.250 |",
        "| KL to the full cache, nats per token | 0.042 |",
        "| teacher's span mass covered by this router | 31.0% |",
        'SeKVAdapter.from_pretrained("me/my-adapter", backbone)',
        "--backbone Qwen/Qwen3-8B --adapter me/my-adapter",
    ):
        assert line in card
    assert "column" not in card
    assert "9.0" not in card
    assert "Evaluation" not in card


def test_the_embedded_backbone_is_named_as_on_the_hub():
    card = model_card(payload("smollm2-135m"), "out")
    assert header(card)["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "--backbone smollm2-135m" in card


def test_a_local_backbone_has_no_place_on_the_hub(tmp_path):
    card = model_card(payload(str(tmp_path / "mine")), "out")
    assert "base_model" not in header(card)
    assert str(tmp_path) not in card
    assert "| backbone | mine |" in card


def test_the_card_of_a_run_without_validation_has_no_figures():
    assert "Figures" not in model_card(payload(metrics={}), "out")


def test_results_of_an_evaluation_are_shown(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps([asdict(RESULT)]))
    results = read_results(tmp_path / "results.json")
    assert results == [RESULT]
    card = model_card(payload(), "out", results)
    assert "## Evaluation, compressed before the question is known" in card
    assert "| niah:2048 | sekv | 10% | 8 | 87.5 ± 12.5 | 204 | 4.7 MB | 610 KB |" in card


@pytest.mark.parametrize("content", ["{", "[1]", '[{"policy": "sekv"}]', "3"])
def test_results_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(DataError, match=r"results\.json is not a results\.json"):
        read_results(tmp_path / "results.json")


def test_missing_results_are_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.json cannot be read"):
        read_results(tmp_path / "gone.json")


def test_folders_of_somebodys_disk_are_left_out():
    data = {"paths": ["/home/me/books", "papers.jsonl"], "file_list": "https://host/list.txt", "length": 8}
    assert without_folders(data) == {
        "paths": ["books", "papers.jsonl"],
        "file_list": "https://host/list.txt",
        "length": 8,
    }
