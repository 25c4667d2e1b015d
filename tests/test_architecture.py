"""Published architectures on the meta device: nothing is downloaded, nothing allocated."""

from __future__ import annotations

import json

import pytest

from sekv import architecture
from sekv.adapter import SeKVAdapter, SeKVConfig
from sekv.architecture import find_architecture, shipped_architectures
from sekv.errors import BackboneError

# What the Hub states of the safetensors of each model.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "mistralai/Mistral-7B-Instruct-v0.2": 7_241_732_096,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
}
INSTRUCT = {name for name in shipped_architectures() if name.startswith("meta-llama") and name.endswith("-Instruct")}


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path, no_network):
    monkeypatch.setenv("SEKV_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_the_table_has_the_published_sizes(name, count):
    backbone = find_architecture(name).backbone
    assert backbone.device.type == "meta"
    assert backbone.num_parameters == count
    assert len(backbone.geometry.compressible) == backbone.geometry.num_layers


def test_the_table_holds_nothing_that_is_not_checked():
    table = shipped_architectures()
    assert table.keys() == PARAMETERS.keys() | INSTRUCT
    for name in INSTRUCT:
        assert table[name] == table[name.removesuffix("-Instruct")]


def test_an_adapter_is_the_one_that_training_makes(make_tiny_backbone, tmp_path):
    backbone = make_tiny_backbone("qwen3")
    backbone.model.config.save_pretrained(tmp_path)
    config = SeKVConfig(routing_dim=8, threshold="global")
    planned, made = find_architecture(str(tmp_path)).adapter(config), SeKVAdapter.create(backbone, config)
    assert {n: p.shape for n, p in planned.named_parameters()} == {n: p.shape for n, p in made.named_parameters()}
    assert planned.parameter_share == made.parameter_share


def test_the_users_cache_goes_before_the_table(tmp_path):
    folder = tmp_path / "cache" / "smollm2-135m"
    folder.mkdir(parents=True)
    fields = {**shipped_architectures()["smollm2-135m"], "num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(fields))
    found = find_architecture("smollm2-135m")
    assert found.backbone.geometry.num_layers == 3
    assert str(folder) in found.source


def test_of_another_hub_id_only_the_config_is_fetched(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shipped_architectures()["Qwen/Qwen3-4B"]))
    asked = []
    monkeypatch.setattr(architecture, "hub_snapshot", lambda *arguments: asked.append(arguments) or tmp_path)
    assert find_architecture("org/other").backbone.num_parameters == PARAMETERS["Qwen/Qwen3-4B"]
    assert asked == [("org/other", ("config.json",))]


def test_without_a_network_another_hub_id_is_refused():
    with pytest.raises(BackboneError, match="'org/other' is not in the Hub's cache and the Hub cannot be reached"):
        find_architecture("org/other")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": "nonsense"}', "describes no causal LM"),
        ('{"model_type": "gpt2"}', "no rotary position embedding"),
    ],
)
def test_a_config_that_is_no_backbone_is_refused(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(BackboneError, match=message):
        _ = find_architecture(str(tmp_path)).backbone


@pytest.mark.parametrize("name", ["/no/such/folder", "nonsense", "./here/there"])
def test_what_can_be_nowhere_is_refused(name):
    with pytest.raises(BackboneError, match=r"neither a folder with config\.json, nor a Hub id, nor one of smoll"):
        find_architecture(name)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(BackboneError, match=r"neither a folder with config\.json"):
        find_architecture(str(tmp_path))
