"""Documents to sequences, the held-out split, order, sharding and resuming."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from sekv.corpus import is_held_out
from sekv.errors import DataError
from train.data import BatchStream, BuiltinCorpus, LocalFiles, ResumableLoader, collate, cut_to_sequences


def test_long_documents_are_cut_and_short_rests_dropped():
    assert list(cut_to_sequences([list(range(10))], length=4, min_length=3, separator=99)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert list(cut_to_sequences([list(range(11))], 4, 3, 99))[-1] == [8, 9, 10]


def test_documents_between_the_limits_stay_whole():
    assert list(cut_to_sequences([[1, 2, 3], [4, 5, 6, 7]], 4, 3, 99)) == [[1, 2, 3], [4, 5, 6, 7]]


def test_short_documents_are_joined_with_a_separator_until_a_sequence_is_full():
    documents = [[1, 2], [3], [4, 5], [6]]
    assert list(cut_to_sequences(documents, length=5, min_length=3, separator=9)) == [[1, 2, 9, 3, 9]]
    assert list(cut_to_sequences(documents[:3], length=8, min_length=3, separator=9)) == [[1, 2, 9, 3, 9, 4, 5]]


def test_nothing_long_enough_gives_nothing():
    assert list(cut_to_sequences([[1], [2]], length=8, min_length=4, separator=9)) == []


def test_collate_pads_on_the_left():
    batch = collate([[1, 2, 3], [4]])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [0, 0, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_every_epoch_is_another_order_of_the_same_sequences():
    stream = BatchStream(size=10, batch_size=2, seed=3)
    first = [i for batch in stream for i in batch]
    stream.position = 5
    second = [i for batch in stream for i in batch]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_a_stream_is_a_function_of_its_seed():
    assert list(BatchStream(10, 2, seed=3)) == list(BatchStream(10, 2, seed=3))
    assert list(BatchStream(10, 2, seed=3)) != list(BatchStream(10, 2, seed=4))


def test_ranks_share_the_batches_of_one_process():
    whole = list(BatchStream(11, batch_size=4, seed=0))
    ranks = [list(BatchStream(11, batch_size=2, seed=0, rank=r, world_size=2)) for r in range(2)]
    assert len(whole) == len(ranks[0]) == len(ranks[1]) == 2
    for together, even, odd in zip(whole, *ranks, strict=True):
        assert [together[0::2], together[1::2]] == [even, odd]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 5, 7])
def test_a_restored_loader_goes_on_where_it_stopped(workers, stop):
    sequences = [[i, i] for i in range(10)]

    def loader():
        return ResumableLoader(sequences, BatchStream(10, 2, seed=1), collate_fn=collate, num_workers=workers)

    def read(source, count):
        seen = []
        while len(seen) < count:
            for batch in source:
                seen.append(batch["input_ids"][:, 0].tolist())
                if len(seen) == count:
                    break
        return seen

    expected = read(loader(), 12)
    first = loader()
    seen = read(first, stop)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert seen + read(second, 12 - stop) == expected


def test_training_and_held_out_documents_are_disjoint_by_hash(corpus_folder, tokenizer, make_data):
    data = make_data(val_sequences=100)
    data.tokenizer = tokenizer
    texts = [path.read_text() for path in sorted(corpus_folder.iterdir())]
    held_out = [text for text in texts if is_held_out(text)]
    assert 0 < len(held_out) < len(texts)
    assert {tuple(s) for s in data.sequences(held_out=True)} == {
        tuple(tokenizer(t)["input_ids"][:400]) for t in held_out
    }
    assert not {tuple(s) for s in data.sequences(False)} & {tuple(s) for s in data.sequences(True)}


def test_jsonl_and_folders_are_read(tmp_path, tokenizer, make_data):
    lines = [json.dumps({"content": f"document {i} " * 10}) for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    (tmp_path / "notes.md").write_text("ignored")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("another document " * 10)
    data = LocalFiles([str(tmp_path)], column="content", length=200, min_length=50, val_sequences=0)
    assert len(data.sources()["files"]) == 31
    assert "document 7 " * 10 in data.sources()["files"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "fine"}\n{"text": "bro', r"bad\.jsonl, line 2: not valid JSON"),
        ('{"body": "text"}', r"line 1: no text under 'text' \(found: body\); set data\.column"),
        ("[1, 2]", r"no text under 'text' \(found: list\)"),
    ],
)
def test_a_broken_line_is_named(tmp_path, content, message):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        LocalFiles([str(tmp_path / "bad.jsonl")]).sources()


def test_a_line_separator_inside_a_json_string_is_not_the_end_of_a_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one\u2028two"}, ensure_ascii=False), encoding="utf-8")
    assert LocalFiles([str(tmp_path)]).sources()["files"] == ["one\u2028two"]


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match="gone does not exist"):
        LocalFiles([str(tmp_path / "gone")])
    with pytest.raises(DataError, match=r"holds no \.txt or \.jsonl file"):
        LocalFiles([str(tmp_path)])
    (tmp_path / "x.pdf").write_bytes(b"x")
    with pytest.raises(DataError, match=r"x\.pdf is neither \.txt nor \.jsonl"):
        LocalFiles([str(tmp_path / "x.pdf")])
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"x\.txt cannot be read as UTF-8"):
        LocalFiles([str(tmp_path / "x.txt")]).sources()


def test_too_little_text_says_what_to_change(tmp_path, tokenizer):
    (tmp_path / "x.txt").write_text("short")
    data = LocalFiles([str(tmp_path)], length=100, min_length=50, val_sequences=0)
    data.tokenizer = tokenizer
    with pytest.raises(DataError, match="0 sequences of 50 to 100 tokens"):
        data.train_dataloader()
    (tmp_path / "x.txt").write_text("long enough " * 20)
    data = LocalFiles([str(tmp_path)], length=100, min_length=50, val_sequences=2)
    data.tokenizer = tokenizer
    with pytest.raises(DataError, match="no held-out sequence"):
        data.train_dataloader()


def test_too_few_sequences_for_all_processes_are_refused(make_data, tokenizer):
    data = make_data(max_documents=3, val_sequences=0)
    data.tokenizer = tokenizer
    assert len(data.train_dataloader()) == 1
    data.trainer = SimpleNamespace(global_rank=1, world_size=2)
    with pytest.raises(DataError, match=r"make 3 sequences .* too few for a batch of 2 on each of 2 process"):
        data.train_dataloader()


def test_no_tokenizer_is_said(make_data):
    with pytest.raises(DataError, match="no tokenizer"):
        make_data().train_dataloader()


@pytest.mark.parametrize(
    "options",
    [
        {"min_length": 0},
        {"min_length": 500},
        {"batch_size": 0},
        {"val_sequences": -1},
        {"max_documents": -1},
        {"max_documents": 0},
        {"num_workers": -1},
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
    data = BuiltinCorpus(length=240, min_length=200, max_documents=4, val_sequences=0)
    data.tokenizer = tokenizer
    first_two = [tokenizer.decode(s) for s in data.sequences(False)[:2]]
    assert [text[:3] for text in first_two] == ["pro", "x ="]
    assert len(data.sequences(False)) == 8
    assert len(BuiltinCorpus(kinds=("code",)).sources()) == 1
    with pytest.raises(DataError, match="english, code, got 'poems'"):
        BuiltinCorpus(kinds=("poems",))


def test_real_sources_are_there():
    sources = BuiltinCorpus().sources()
    assert all(len(texts) > 20 and all(isinstance(t, str) for t in texts) for texts in sources.values())


def test_batches_are_tensors_of_the_right_kind(make_data, tokenizer):
    data = make_data()
    data.tokenizer = tokenizer
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    assert batch["input_ids"].shape[0] == 2
    assert len(list(data.val_dataloader())) == 1
    assert make_data(val_sequences=0).val_dataloader() == []
