"""Data modules: which documents become training and validation batches, and how much may be unusable."""

from __future__ import annotations

import json
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from sekv.corpus import is_held_out
from sekv.errors import DataError
from tests.train.data_files import make_texts, write
from train.data import BuiltinCorpus, HubDataset, LocalFiles, RedPajama, RedPajamaV2
from train.errors import ConfigError


def ready(data, tokenizer, steps=10**6, rank=0, world_size=1):
    """The data module as a trainer would leave it."""
    data.tokenizer = tokenizer
    data.trainer = SimpleNamespace(
        max_steps=steps, global_rank=rank, world_size=world_size, accumulate_grad_batches=1, lightning_module=None
    )
    return data


def read(data, tokenizer, count):
    """The first `count` training sequences as texts, with batches of one."""
    data.check()
    return [tokenizer.decode(batch["input_ids"][0]) for batch in islice(data.train_dataloader(), count)]


def test_training_and_held_out_documents_are_disjoint_by_hash(corpus_folder, tokenizer, make_data):
    data = ready(make_data(val_sequences=100, batch_size=1), tokenizer)
    texts = [path.read_text() for path in sorted(corpus_folder.iterdir())]
    held_out = {text[:400] for text in texts if is_held_out(text)}
    assert 0 < len(held_out) < len(texts)
    trained = set(read(data, tokenizer, len(texts) - len(held_out)))
    validated = {
        tokenizer.decode(ids[mask.bool()])
        for batch in data.val_dataloader()
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    }
    assert validated == held_out
    assert trained == {text[:400] for text in texts} - held_out


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "deep/a.ndjson"])
def test_every_format_gives_the_same_documents(name, tmp_path, tokenizer):
    texts = make_texts(40)
    write(tmp_path / name, texts, "content")
    (tmp_path / "notes.md").write_text("ignored")
    data = LocalFiles([str(tmp_path)], column="content", length=500, min_length=60, val_sequences=0)
    training = [text for text in texts if not is_held_out(text)]
    assert sorted(read(ready(data, tokenizer), tokenizer, len(training))) == sorted(training)
    assert data.tally.records == 40


def test_a_file_address_is_read_like_a_path(tmp_path, tokenizer):
    texts = make_texts(20)
    path = write(tmp_path / "a.jsonl", texts)
    options = {"length": 500, "min_length": 60, "val_sequences": 0}
    first, second = (
        read(ready(LocalFiles([p], **options), tokenizer), tokenizer, 10) for p in (str(path), path.as_uri())
    )
    assert first == second


def test_long_documents_give_many_windows_and_short_ones_are_left_out(tmp_path, tokenizer):
    texts = [f"{c}" * n for c, n in (("a", 1000), ("b", 99), ("c", 100), ("d", 350))]
    assert not any(map(is_held_out, texts))
    write(tmp_path / "a.jsonl", texts)
    options = {"length": 100, "min_length": 100, "val_sequences": 0}
    data = ready(LocalFiles([str(tmp_path)], min_document=None, **options), tokenizer)
    assert sorted(read(data, tokenizer, 14)) == ["a" * 100] * 10 + ["c" * 100] + ["d" * 100] * 3
    assert data.tally.short == 1
    data = ready(LocalFiles([str(tmp_path)], min_document=200, **options), tokenizer)
    assert sorted(read(data, tokenizer, 13)) == ["a" * 100] * 10 + ["d" * 100] * 3


def test_weights_decide_how_often_a_source_is_drawn_from(tmp_path, tokenizer):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", [f"{name}{i} ".ljust(80, name) for i in range(60)])
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    options = {"length": 80, "min_length": 80, "min_document": None, "val_sequences": 0}
    data = ready(LocalFiles(paths, weights=[3, 1], streams=2, **options), tokenizer)
    drawn = read(data, tokenizer, 400)
    assert 0.7 < sum(text.startswith("a") for text in drawn) / 400 < 0.8
    with pytest.raises(DataError, match="a number above 0 for each of the 2"):
        LocalFiles(paths, weights=[1.0])


def test_a_pass_takes_at_most_so_many_documents(make_data, tokenizer):
    data = ready(make_data(max_documents=3, batch_size=1), tokenizer)
    assert len(set(read(data, tokenizer, 30))) == 3


def test_redpajama_reads_its_published_list(tmp_path, tokenizer):
    """The list names files; the folder of a file is its subset."""
    files = [write(tmp_path / s / f"{s}_{i}.jsonl", make_texts(30, i)) for s in ("arxiv", "github") for i in range(2)]
    files.append(write(tmp_path / "c4" / "c4.jsonl", ["not asked for " * 20] * 30))
    listing = tmp_path / "urls.txt"
    listing.write_text("\n".join(file.as_uri() for file in files) + "\n\n")
    data = RedPajama({"arxiv": 1, "github": 2}, str(listing), length=200, min_length=100, val_sequences=2, streams=2)
    assert [(s.name, s.weight, len(s.files)) for s in data.sources()] == [("arxiv", 1, 2), ("github", 2, 2)]
    drawn = read(ready(data, tokenizer), tokenizer, 100)
    assert not any("not asked for" in text for text in drawn)
    assert all(100 <= len(text) <= 200 for text in drawn)
    assert len(list(data.val_dataloader())) == 2
    with pytest.raises(DataError, match=r"has no files of book \(it has arxiv, c4, github\)"):
        RedPajama(file_list=str(listing)).sources()
    with pytest.raises(DataError, match=r"the list of files /no/such/urls\.txt cannot be read"):
        RedPajama(file_list="/no/such/urls.txt").sources()


def test_redpajama_v2_reads_its_listings(tmp_path, tokenizer):
    write(tmp_path / "documents" / "2023-06" / "0000" / "en_head.json.gz", make_texts(40), "raw_content")
    (tmp_path / "listings").mkdir()
    (tmp_path / "listings" / "en-2023-06-head_middle.txt").write_text("2023-06/0000/en_head\n")
    data = RedPajamaV2(["2023-06"], base=str(tmp_path), length=200, min_length=100, val_sequences=0)
    assert len(read(ready(data, tokenizer), tokenizer, 20)) == 20


def test_a_dataset_laid_out_as_on_the_hub_is_read(tmp_path, tokenizer):
    texts = make_texts(40)
    write(tmp_path / "train-00000.parquet", texts[:20], "body")
    write(tmp_path / "train-00001.parquet", texts[20:], "body")
    data = HubDataset(str(tmp_path), column="body", length=500, min_length=100, val_sequences=0, streams=2)
    training = {text for text in texts if not is_held_out(text)}
    assert set(read(ready(data, tokenizer), tokenizer, 80)) == training
    with pytest.raises(DataError, match="has no split 'validation'"):
        HubDataset(str(tmp_path), split="validation").sources()
    with pytest.raises(DataError, match="the dataset '/no/such' cannot be opened"):
        HubDataset("/no/such").sources()


def broken(tmp_path, good, bad):
    lines = [json.dumps({"text": text}) for text in make_texts(good)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, *bad]) + "\n")
    options = {"length": 400, "min_length": 60, "val_sequences": 0}
    return LocalFiles([str(tmp_path / "a.jsonl")], **options)


def test_a_few_unusable_records_are_counted_and_skipped(tmp_path, tokenizer):
    data = ready(broken(tmp_path, 396, ['{"text": "bro', '{"text": ""}', "", '{"text": 3}', "[1]"]), tokenizer)
    read(data, tokenizer, 300)
    assert (data.tally.records, data.tally.corrupt, data.tally.textless) == (400, 1, 3)
    assert "1 corrupt, 3 without text" in data.tally.describe()
    assert "a.jsonl, record 400: no text under 'text' (found: list)" in data.tally.describe()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"text": "bro', r"a\.jsonl, record 3: not valid JSON"),
        ('{"body": "text"}', r"record 3: no text under 'text' \(found: body\); set data\.column"),
        ("[1, 2]", r"no text under 'text' \(found: list\)"),
        ('{"text": "  "}', "the text is empty"),
    ],
)
def test_more_than_one_in_a_hundred_stops_with_the_files_name(bad, message, tmp_path, tokenizer):
    with pytest.raises(DataError, match=f"1 of 3 records are unusable .* more than 1%; the latest: .*{message}"):
        ready(broken(tmp_path, 2, [bad]), tokenizer).check()


def test_too_many_unusable_records_stop_in_the_middle_of_a_pass(tmp_path, tokenizer):
    good = [json.dumps({"text": text}) for text in make_texts(3000)]
    lines = [line for i, text in enumerate(good) for line in ([text, "{"] if i >= 100 and i % 20 == 0 else [text])]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = LocalFiles([str(tmp_path)], length=400, min_length=60, val_sequences=0, shuffle_buffer=64)
    ready(data, tokenizer).check()
    with pytest.raises(DataError, match=r"records are unusable .*a\.jsonl, record \d+: not valid JSON"):
        read(data, tokenizer, 3000)
    assert data.tally.records < 1000


def test_a_line_separator_inside_a_json_string_is_not_the_end_of_a_line(tmp_path, tokenizer):
    text = "one\u2028two " * 20
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False), encoding="utf-8")
    data = LocalFiles([str(tmp_path)], length=500, min_length=60, val_sequences=0)
    assert read(ready(data, tokenizer), tokenizer, 1) == [text]


def test_bytes_that_are_no_text_are_corrupt(tmp_path, tokenizer):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"x\.txt, record 1: not UTF-8"):
        ready(LocalFiles([str(tmp_path)]), tokenizer).check()


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.parquet", "b.jsonl.zst"])
def test_an_unreadable_file_stops_where_files_are_few(name, tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", make_texts(40))
    (tmp_path / name).write_bytes(b"neither packed nor a table")
    data = LocalFiles([str(tmp_path)], length=400, min_length=60, val_sequences=0)
    with pytest.raises(DataError, match=rf"1 of 2 files cannot be read, more than 1%; the latest: .*{name}"):
        read(ready(data, tokenizer), tokenizer, 200)


def test_one_unreadable_file_of_many_is_skipped(tmp_path, tokenizer):
    for i in range(101):
        write(tmp_path / f"{i}.jsonl", [f"{i} ".ljust(100, "x")])
    (tmp_path / "z.jsonl.gz").write_bytes(b"not packed")
    data = ready(LocalFiles([str(tmp_path)], length=100, min_length=60, val_sequences=0), tokenizer)
    read(data, tokenizer, 150)
    assert [name.rsplit("/", 1)[1] for name in data.tally.files] == ["z.jsonl.gz"]


def test_a_truncated_file_keeps_what_came_before(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl.gz", make_texts(2000))
    path.write_bytes(path.read_bytes()[:-200])
    data = ready(LocalFiles([str(tmp_path)], length=400, min_length=60, val_sequences=0), tokenizer)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read: it is truncated"):
        read(data, tokenizer, 3000)


def test_missing_and_unknown_files_are_named(tmp_path):
    with pytest.raises(DataError, match="gone does not exist"):
        LocalFiles([str(tmp_path / "gone")])
    with pytest.raises(DataError, match=r"holds no file of a known kind \(\.txt, \.jsonl"):
        LocalFiles([str(tmp_path)])
    (tmp_path / "x.pdf").write_bytes(b"x")
    with pytest.raises(DataError, match=r"x\.pdf is of no known kind"):
        LocalFiles([str(tmp_path / "x.pdf")])
    with pytest.raises(DataError, match=r"data\.paths is empty"):
        LocalFiles([])


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path, tokenizer):
    write(tmp_path / "a.parquet", make_texts(40), "body")
    with pytest.raises(DataError, match=r"no column 'text' \(found: body, id\)"):
        ready(LocalFiles([str(tmp_path)], length=400, min_length=60), tokenizer).check()


def test_too_little_text_says_what_to_change(tmp_path, tokenizer):
    (tmp_path / "x.txt").write_text("short")
    data = LocalFiles([str(tmp_path)], length=100, min_length=50, val_sequences=0)
    with pytest.raises(DataError, match="0 sequences of 50 to 100 tokens"):
        ready(data, tokenizer).check()
    (tmp_path / "x.txt").write_text("long enough " * 20)
    data = LocalFiles([str(tmp_path)], length=100, min_length=50, val_sequences=2)
    with pytest.raises(DataError, match="no held-out sequence"):
        ready(data, tokenizer).check()


def test_a_stage_without_long_enough_documents_is_refused_at_once(make_data, tokenizer):
    data = make_data(min_document=None, curriculum={5: 800})
    with pytest.raises(DataError, match="0 sequences of 520 to 800 tokens"):
        ready(data, tokenizer).check()


def test_too_few_sequences_for_all_processes_are_refused(make_data, tokenizer):
    data = make_data(max_documents=3, val_sequences=0)
    ready(data, tokenizer).check()
    with pytest.raises(DataError, match=r"make 3 sequences .* too few for a batch of 2 on each of 2 process"):
        ready(data, tokenizer, world_size=2).check()


def test_no_tokenizer_is_said(make_data):
    with pytest.raises(DataError, match="no tokenizer"):
        make_data().train_dataloader()


def test_data_without_an_end_need_a_number_of_steps(make_data, tokenizer):
    with pytest.raises(ConfigError, match=r"set trainer\.max_steps"):
        ready(make_data(), tokenizer, steps=-1).train_dataloader()


@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 0},
        {"min_length": 500},
        {"min_document": -1},
        {"batch_size": 0},
        {"val_sequences": -1},
        {"max_documents": -1},
        {"max_documents": 0},
        {"num_workers": -1},
        {"streams": 0},
        {"shuffle_buffer": 0},
    ],
)
def test_impossible_sizes_are_refused(make_data, options):
    with pytest.raises(DataError, match="need"):
        make_data(**options)


def test_the_builtin_corpus_has_english_and_code(tokenizer, monkeypatch):
    monkeypatch.setattr(
        BuiltinCorpus,
        "readers",
        {
            "english": lambda: [f"prose {i} " * 30 for i in range(30)],
            "code": lambda: [f"x = {i}\n" * 40 for i in range(30)],
        },
    )
    data = ready(BuiltinCorpus(length=240, min_length=200, max_documents=4, val_sequences=0), tokenizer)
    drawn = read(data, tokenizer, 8)
    assert sorted({text[:3] for text in drawn}) == ["pro", "x ="]
    assert len(set(drawn)) == 8
    with pytest.raises(DataError, match="english, code, got 'poems'"):
        BuiltinCorpus(kinds=("poems",))


def test_real_sources_are_there():
    (source,) = BuiltinCorpus().sources()
    assert len(source.files[0].texts) > 40


def test_batches_are_tensors_of_the_right_kind(make_data, tokenizer):
    data = ready(make_data(), tokenizer)
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    assert batch["input_ids"].shape[0] == 2
    assert len(list(data.val_dataloader())) == 1
    assert make_data(val_sequences=0).val_dataloader() == []


def test_the_warm_start_reads_what_training_begins_with(make_data, tokenizer):
    data = ready(make_data(batch_size=1, streams=2), tokenizer)
    loader = data.train_dataloader()
    warm = [tokenizer.decode(ids) for ids in data.warm_start_sequences(4)]
    assert warm == [tokenizer.decode(batch["input_ids"][0]) for batch in islice(loader, 4)]
    assert [stream["index"] for stream in loader.state_dict()["streams"]] == [2, 2]
