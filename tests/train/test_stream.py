"""Streams: every document once a pass, whoever reads it; and a place that is restored to the sequence."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from sekv.corpus import is_held_out
from sekv.errors import DataError
from tests.train.data_files import make_texts, write
from tests.train.test_data import ready
from train.curriculum import Curriculum
from train.data import LocalFiles
from train.data.files import TextFile
from train.data.sequences import collate, cut_to_sequences
from train.data.stream import deal


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
    batch = collate([[1, 2, 3], np.array([4], dtype=np.int32)])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [0, 0, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_reading_can_begin_behind_any_record(name, tmp_path):
    file = TextFile(str(write(tmp_path / name, make_texts(40))))
    whole = list(file.read(0))
    for i in (0, 1, 6, 7, 20, 38, 39):
        assert list(file.read(whole[i].end)) == whole[i + 1 :]


def test_a_remote_file_that_breaks_off_is_read_on_where_it_broke(tmp_path, monkeypatch):
    import fsspec

    from train.data import files

    texts = make_texts(40)
    path = write(tmp_path / "a.jsonl", texts)
    opened = []

    def fragile(name):
        file = path.open("rb", buffering=0)
        if len(opened) < 2:
            read = file.readinto

            class Broken:
                closed = False
                seek, tell = file.seek, file.tell

                def readable(self):
                    return True

                def readinto(self, buffer):
                    if file.tell() > 2000 * (1 + len(opened)):
                        raise OSError("connection reset")
                    return read(memoryview(buffer)[:500])

                def close(self):
                    file.close()

            file = Broken()
        opened.append(name)
        return file

    monkeypatch.setattr(files, "_open", fragile)
    monkeypatch.setattr(files, "_RETRY_SECONDS", 0.0)
    remote = TextFile("memory://a.jsonl")
    assert [remote.parse(record.content) for record in remote.read(0)] == texts
    assert len(opened) == 3
    assert fsspec.get_filesystem_class("memory")  # a scheme that counts as remote


@pytest.mark.parametrize("streams", [1, 2, 3, 4, 7])
def test_files_are_dealt_disjointly_and_completely(streams):
    files = [TextFile(f"{i}.jsonl") for i in range(3)]
    dealt = [
        (share.file.name, record)
        for v in range(streams)
        for share in deal(files, v, streams)
        for record in range(20)
        if record % share.parts == share.part
    ]
    assert len(dealt) == len(set(dealt)) == 60


def three_files(tmp_path, texts):
    for i, part in enumerate((texts[:50], texts[50:60], texts[60:])):  # of very different size
        write(tmp_path / f"{i}.jsonl", part)
    return [str(tmp_path)]


@pytest.mark.parametrize(("streams", "workers"), [(4, 2), (1, 2), (6, 0)])
def test_ranks_and_workers_read_disjointly_completely_and_for_as_many_steps(streams, workers, tmp_path, tokenizer):
    """3 files x 2 ranks x 2 workers, for streams that divide evenly among readers and for those that do not."""
    texts = make_texts(100, size=(60, 200))
    paths = three_files(tmp_path, texts)
    training = sorted(text for text in texts if not is_held_out(text))
    seen, steps = [], []
    for rank in range(2):
        data = LocalFiles(
            paths, length=300, min_length=40, val_sequences=0, streams=streams, num_workers=workers, batch_size=1
        )
        loader = ready(data, tokenizer, steps=400, rank=rank, world_size=2).train_dataloader()
        steps.append(len(loader))
        passes, own = {}, []
        for batch in islice(loader, 400):
            number = (loader.batches - 1) * 2 + rank
            stream = number % streams
            state = loader._states[stream]
            passes.setdefault(stream, 0)
            # In its first pass a stream has drawn as many sequences as its index says.
            own.append((stream, state["index"], tokenizer.decode(batch["input_ids"][0])))
        seen += own
        data.trainer = None
    assert steps == [401, 401]
    assert len({(stream, index) for stream, index, _ in seen}) == len(seen)  # no two ranks draw the same one
    first_pass = []
    for stream in range(streams):
        drawn = [text for _, _, text in sorted((s, i, t) for s, i, t in seen if s == stream)]
        size = next(n for n in range(1, len(drawn) + 1) if n == len(drawn) or drawn[n] in drawn[:n])
        first_pass += drawn[:size]
    assert sorted(first_pass) == training


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 0), (2, 1), (4, 0)])
def test_neither_processes_nor_workers_change_what_is_trained_on(world, workers, tmp_path, tokenizer):
    paths = three_files(tmp_path, make_texts(100))
    options = {"length": 120, "min_length": 60, "val_sequences": 0, "streams": 4, "shuffle_buffer": 40}
    options["curriculum"] = {5: 240}

    def batches(rank, world_size, num_workers, count):
        data = LocalFiles(paths, batch_size=8 // world_size, num_workers=num_workers, **options)
        loader = ready(data, tokenizer, rank=rank, world_size=world_size).train_dataloader()
        return [[r[r > 0].tolist() for r in batch["input_ids"]] for batch in islice(loader, count)]

    whole = batches(0, 1, 0, 9)
    assert [len(batch) for batch in whole] == [8] * 5 + [4] * 4
    assert {len(row) > 120 for row in whole[6]} == {True}
    parts = [batches(rank, world, workers, 9) for rank in range(world)]
    for step, together in enumerate(whole):
        for rank in range(world):
            assert parts[rank][step] == together[rank::world]


def loader_over(paths, tokenizer, **options):
    settings = {"length": 100, "min_length": 60, "val_sequences": 0, "batch_size": 2, "shuffle_buffer": 12}
    return ready(LocalFiles(paths, **{**settings, **options}), tokenizer).train_dataloader()


def take(loader, count):
    return [batch["input_ids"].tolist() for batch in islice(loader, count)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "streams": 4},
        {"streams": 3, "max_documents": 20},
        {"streams": 2, "min_document": None, "curriculum": {7: 200}},
        {"shuffle_buffer": 10_000},
        {"min_document": 150, "streams": 5, "curriculum": {3: 200}, "num_workers": 2},
    ],
)
@pytest.mark.parametrize("stop", [3, 7, 60])
def test_a_restored_loader_goes_on_where_it_stopped(options, stop, tmp_path, tokenizer):
    """Also after several passes, in the middle of a block, and just before, at and after a change of stage."""
    paths = three_files(tmp_path, make_texts(100))
    expected = take(loader_over(paths, tokenizer, **options), stop + 15)
    first = loader_over(paths, tokenizer, **options)
    seen = take(first, stop)
    second = loader_over(paths, tokenizer, **options)
    second.load_state_dict(first.state_dict())
    assert seen + take(second, 15) == expected


def test_a_place_is_plain_small_and_survives_another_number_of_workers(tmp_path, tokenizer):
    import json

    paths = three_files(tmp_path, make_texts(100))
    first = loader_over(paths, tokenizer, streams=4)
    seen = take(first, 9)
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 2000
    second = loader_over(paths, tokenizer, streams=4, num_workers=2)
    second.load_state_dict(state)
    assert seen + take(second, 6) == take(loader_over(paths, tokenizer, streams=4), 15)


def test_passes_are_shuffled_anew_and_depend_on_the_seed(tmp_path, tokenizer):
    path = str(write(tmp_path / "a.jsonl", make_texts(40)))
    options = {"length": 1000, "batch_size": 1, "shuffle_buffer": 1000}
    n = sum(not is_held_out(text) for text in make_texts(40))
    drawn = take(loader_over([path], tokenizer, **options), 2 * n)
    assert sorted(drawn[:n]) == sorted(drawn[n:])
    assert drawn[:n] != drawn[n:]
    assert drawn == take(loader_over([path], tokenizer, **options), 2 * n)
    assert drawn != take(loader_over([path], tokenizer, seed=1, **options), 2 * n)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"streams": 3}, r"counts 2 streams \(data\.streams\), now there are 3"),
        ({"weights": [1.0, 2.0]}, "counts 1 sources, now there are 2"),
    ],
)
def test_a_place_in_other_data_is_refused(change, message, tmp_path, tokenizer):
    paths = [str(write(tmp_path / f"{i}.jsonl", make_texts(30, i))) for i in range(2)]
    state = loader_over(paths, tokenizer, streams=2).state_dict()
    with pytest.raises(DataError, match=message):
        loader_over(paths, tokenizer, **{"streams": 2, **change}).load_state_dict(state)
    with pytest.raises(DataError, match="counts 2 files, now there are 1"):
        loader_over(paths[:1], tokenizer, streams=2).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_any_sequence_is_one_clear_error(workers, tmp_path, tokenizer):
    """From a worker too: no traceback of another process in the message."""
    paths = [str(write(tmp_path / "a.jsonl", make_texts(40))), str(write(tmp_path / "b.jsonl", ["tiny"] * 3))]
    loader = loader_over(paths, tokenizer, streams=2, min_document=None, num_workers=workers)
    with pytest.raises(DataError, match=r"^\S*b\.jsonl: no document makes a training sequence of 60 to 100 tokens"):
        take(loader, 10)


def test_the_stage_of_a_sequence_does_not_depend_on_the_number_of_processes():
    one, two = (Curriculum(100, 100, b, 1, {3: 200}) for b in (4, 2))
    assert [one.at_sequence(i).length for i in range(30)] == [two.at_sequence(i // 2).length for i in range(30)]
