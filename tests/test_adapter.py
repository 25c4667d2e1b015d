"""The adapter: sizes, saving and loading, and every way a file can be wrong."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sekv.adapter import CONFIG_NAME, WEIGHTS_NAME, RankGate, SeKVAdapter, SeKVConfig
from sekv.errors import AdapterError, PolicyError

CONFIG = SeKVConfig(routing_dim=8, max_rank=4, gate_hidden=5)


@pytest.fixture
def saved(tiny_backbone, tmp_path):
    adapter = SeKVAdapter.create(tiny_backbone, CONFIG)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    adapter.save_pretrained(tmp_path / "adapter", {"steps": 3})
    return adapter, tmp_path / "adapter"


@pytest.mark.parametrize(("index", "key_heads"), [("tokens", 2 * 2), ("summary", 0)])
def test_parameter_count(tiny_backbone, index, key_heads):
    """W, tau, scale, offset or length coefficient, and two biases per head; keys have projections of their own."""
    adapter = SeKVAdapter.create(tiny_backbone, replace(CONFIG, index=index))
    heads = 2 * 4
    gate = (4 + 16) * 5 + 5 + 5 * 4 + 4
    assert adapter.num_parameters == heads * (8 * 16 + 5) + key_heads * 8 * 16 + gate
    assert adapter.parameter_share == adapter.num_parameters / tiny_backbone.num_parameters


def test_round_trip(saved, tiny_backbone):
    adapter, folder = saved
    again = SeKVAdapter.from_pretrained(folder, tiny_backbone)
    assert again.config == CONFIG and not again.training
    for name, value in adapter.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    assert not any(p.requires_grad for p in again.parameters())
    assert sorted(p.name for p in folder.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
    assert json.loads((folder / CONFIG_NAME).read_text())["training"] == {"steps": 3}


def test_dropped_and_renamed_tensors_are_named(saved, tiny_backbone):
    _, folder = saved
    tensors = load_file(folder / WEIGHTS_NAME)
    tensors["gate.exit.bias"] = tensors.pop("gate.outer.bias")
    tensors["bias"] = torch.zeros(3, 3)
    save_file(tensors, folder / WEIGHTS_NAME)
    with pytest.raises(AdapterError) as error:
        SeKVAdapter.from_pretrained(folder, tiny_backbone)
    for part in (
        "missing tensor 'gate.outer.bias'",
        "unexpected tensor 'gate.exit.bias'",
        "'bias' has shape [3, 3], expected [2, 4]",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_weights(saved, tiny_backbone, keep):
    _, folder = saved
    data = (folder / WEIGHTS_NAME).read_bytes()
    (folder / WEIGHTS_NAME).write_bytes(data[:keep])
    with pytest.raises(AdapterError, match="corrupt or truncated"):
        SeKVAdapter.from_pretrained(folder, tiny_backbone)


def test_pickle_is_never_read(saved, tiny_backbone):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was executed",))

    _, folder = saved
    (folder / WEIGHTS_NAME).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(AdapterError, match="corrupt or truncated"):
        SeKVAdapter.from_pretrained(folder, tiny_backbone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=9), "format version 9"),
        (lambda c: c.pop("backbone"), "lacks backbone"),
        (lambda c: c["config"].update(colour="red"), "unknown settings colour"),
        (lambda c: c["config"].update(rope="sideways"), "rope 'sideways' is unknown"),
        (lambda c: c["config"].update(alpha="1"), "adapter_config.json: alpha is '1', expected a number"),
        (lambda c: c["config"].update(alpha=True), "alpha is True, expected a number"),
        (lambda c: c["config"].update(alpha=float("nan")), "alpha is nan, expected a number"),
        (lambda c: c["config"].update(max_span="x"), "max_span is 'x', expected a whole number"),
        (lambda c: c["config"].update(max_rank=4.0), "max_rank is 4.0, expected a whole number"),
        (lambda c: c["config"].update(anchors=1), "anchors is 1, expected true or false"),
        (lambda c: c["config"].update(rope=["pre"]), "rope is .*, expected a text"),
        (lambda c: c["backbone"].pop("num_heads"), "fingerprint lacks num_heads"),
        (lambda c: c["backbone"].update(num_heads="4"), "num_heads of the backbone is '4', expected a whole number"),
        (lambda c: c["backbone"].update(num_kv_heads=0), "num_kv_heads of the backbone is 0, expected"),
        (lambda c: c["backbone"].update(head_dim=0), "head_dim of the backbone is 0, expected"),
        (lambda c: c["backbone"].update(compressible=3), "compressible of the backbone is 3, expected a list"),
        (lambda c: c["backbone"].update(compressible=["0"]), "compressible of the backbone is .*, expected a list"),
        (lambda c: c["backbone"].update(weight_sketch=[]), "weight_sketch of the backbone is .*, expected lists"),
        (lambda c: c["backbone"].update(weight_sketch={"0": ["x"]}), "weight_sketch of the backbone is"),
        (lambda c: c["backbone"]["weight_sketch"].update({"0": [1.0]}), "another length"),
    ],
)
def test_bad_config_is_named(saved, tiny_backbone, change, message):
    _, folder = saved
    payload = json.loads((folder / CONFIG_NAME).read_text())
    change(payload)
    (folder / CONFIG_NAME).write_text(json.dumps(payload))
    with pytest.raises(AdapterError, match=message):
        SeKVAdapter.from_pretrained(folder, tiny_backbone)


def test_missing_files(saved, tiny_backbone, tmp_path):
    _, folder = saved
    with pytest.raises(AdapterError, match=r"adapter_config.json does not exist"):
        SeKVAdapter.from_pretrained(tmp_path / "nowhere", tiny_backbone)
    (folder / WEIGHTS_NAME).unlink()
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors does not exist"):
        SeKVAdapter.from_pretrained(folder, tiny_backbone)
    (folder / CONFIG_NAME).write_text("{")
    with pytest.raises(AdapterError, match="not valid JSON"):
        SeKVAdapter.from_pretrained(folder, tiny_backbone)


def test_another_backbone_is_refused(saved, make_tiny_backbone):
    _, folder = saved
    with pytest.raises(AdapterError, match="num_layers: adapter 2, backbone 3"):
        SeKVAdapter.from_pretrained(folder, make_tiny_backbone("llama", num_hidden_layers=3))
    with pytest.raises(AdapterError, match="another model of the same shape"):
        SeKVAdapter.from_pretrained(folder, make_tiny_backbone("llama", seed=5))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(saved, tiny_backbone, value):
    _, folder = saved
    tensors = load_file(folder / WEIGHTS_NAME)
    tensors["bias"][0, 1] = value
    tensors["gate.inner.weight"][0, 0] = value
    save_file(tensors, folder / WEIGHTS_NAME)
    with pytest.raises(AdapterError, match=r"not finite in 'bias', 'gate\.inner\.weight'"):
        SeKVAdapter.from_pretrained(folder, tiny_backbone)


def test_whole_numbers_are_numbers(saved, tiny_backbone):
    _, folder = saved
    payload = json.loads((folder / CONFIG_NAME).read_text())
    payload["config"]["alpha"] = 2
    (folder / CONFIG_NAME).write_text(json.dumps(payload))
    assert SeKVAdapter.from_pretrained(folder, tiny_backbone).config.alpha == 2


def test_a_folder_that_cannot_be_made_is_named(saved, tmp_path):
    adapter, folder = saved
    with pytest.raises(AdapterError, match=r"adapter_config.json cannot be made: File exists"):
        adapter.save_pretrained(folder / CONFIG_NAME)
    with pytest.raises(AdapterError, match=r"below cannot be made: Not a directory"):
        adapter.save_pretrained(folder / CONFIG_NAME / "below")


def test_a_failed_save_leaves_the_old_adapter(saved, tiny_backbone, monkeypatch):
    adapter, folder = saved
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.setattr("sekv.adapter.save_file", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        adapter.save_pretrained(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    monkeypatch.undo()
    monkeypatch.setattr("sekv.adapter.os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        adapter.save_pretrained(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_rank_gate_starts_open_and_pads_short_spectra():
    gate = RankGate(6, 8, 4)
    sigma = torch.tensor([[3.0, 2.0, 1.0]])
    key = torch.randn(1, 8)
    out = gate(sigma, key)
    assert out.shape == (1, 3) and bool((out > 0.9).all())
    padded = gate(torch.nn.functional.pad(sigma, (0, 3)), key)
    torch.testing.assert_close(out, padded[:, :3])


def test_global_threshold_is_one_number(tiny_backbone):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8, threshold="global"))
    assert adapter.threshold_logit.numel() == 1 and adapter.router(1).threshold.shape == (4,)


def test_bad_settings():
    with pytest.raises(PolicyError, match="rope 'none' is unknown; use one of pre, post"):
        SeKVConfig(rope="none")
    with pytest.raises(PolicyError, match="index 'words' is unknown; use one of tokens, summary"):
        SeKVConfig(index="words")
    with pytest.raises(PolicyError, match="share_group=False needs summary_share=1"):
        SeKVConfig(share_group=False)
    assert not SeKVConfig(share_group=False, summary_share=1.0).cutting().merges
    with pytest.raises(PolicyError, match="max_rank must be at least 1"):
        SeKVConfig(max_rank=0)
    with pytest.raises(PolicyError, match="segmentation 'words' is unknown"):
        SeKVConfig(segmentation="words")


@pytest.fixture
def hub_cache(monkeypatch, tmp_path, no_network):
    """The Hub's cache in a folder of its own, as a download leaves it; no network."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(repo_id, folder):
        commit = "0" * 40
        home = tmp_path / "hub" / f"models--{repo_id.replace('/', '--')}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(commit)
        shutil.copytree(folder, home / "snapshots" / commit)

    return put


def test_an_adapter_is_loaded_by_its_hub_id(tiny_backbone, tmp_path, hub_cache, monkeypatch):
    adapter = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8))
    hub_cache("org/name", adapter.save_pretrained(tmp_path / "saved"))
    monkeypatch.chdir(tmp_path)
    loaded = SeKVAdapter.from_pretrained("org/name", tiny_backbone)
    assert all(torch.equal(p, loaded.state_dict()[name]) for name, p in adapter.state_dict().items())


def test_a_folder_goes_before_the_hub(tiny_backbone, tmp_path, hub_cache, monkeypatch):
    config = SeKVConfig(routing_dim=8)
    hub_cache("org/name", SeKVAdapter.create(tiny_backbone, config).save_pretrained(tmp_path / "saved"))
    monkeypatch.chdir(tmp_path)
    SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=4)).save_pretrained("org/name")
    assert SeKVAdapter.from_pretrained("org/name").config.routing_dim == 4


def test_an_adapter_that_is_nowhere_says_where_it_was_looked_for(hub_cache):
    with pytest.raises(
        AdapterError, match="no folder org/other with an adapter, and on the Hub: 'org/other' is not in"
    ):
        SeKVAdapter.from_pretrained("org/other")


def test_a_repository_that_holds_no_adapter_is_refused(tmp_path, hub_cache):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing")
    hub_cache("org/empty", tmp_path / "empty")
    with pytest.raises(AdapterError, match=r"adapter_config\.json does not exist; give a Hub id, or a folder"):
        SeKVAdapter.from_pretrained("org/empty")


def test_only_the_adapters_files_are_asked_for(tiny_backbone, tmp_path, monkeypatch):
    folder = SeKVAdapter.create(tiny_backbone, SeKVConfig(routing_dim=8)).save_pretrained(tmp_path / "saved")
    asked = []
    monkeypatch.setattr("sekv.hub._unreachable", lambda *arguments: None)
    monkeypatch.setattr(
        "sekv.hub.snapshot_download", lambda repo, **options: asked.append((repo, options)) or str(folder)
    )
    SeKVAdapter.from_pretrained("org/name")
    patterns = ["adapter_config.json", "adapter_model.safetensors"]
    assert asked == [("org/name", {"allow_patterns": patterns, "local_files_only": False})]


def test_an_adapter_from_before_layers_differed_gives_all_the_same_rows(saved, tiny_backbone):
    adapter, folder = saved
    adapter.row_factor.copy_(torch.tensor([0.5, 1.5]))
    adapter.save_pretrained(folder)
    assert SeKVAdapter.from_pretrained(folder, tiny_backbone).row_factor.tolist() == [0.5, 1.5]
    tensors = load_file(folder / WEIGHTS_NAME)
    del tensors["row_factor"]
    save_file(tensors, folder / WEIGHTS_NAME)
    assert SeKVAdapter.from_pretrained(folder, tiny_backbone).row_factor.tolist() == [1.0, 1.0]
