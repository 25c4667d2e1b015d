"""`longbench:NAME`, `longbench_e:NAME`, `infinitebench:NAME`, `loogle:NAME`, `gsm8k` and `mmlu_pro[:CATEGORY]`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sekv.errors import DataError
from sekv.evaluation.benchmarks import infinitebench, longbench, loogle, shots
from sekv.evaluation.benchmarks.parts import Parts, Row
from sekv.evaluation.benchmarks.source import hub_rows, local_rows
from sekv.evaluation.sample import Sample, Task

_NAMES: dict[str, tuple[str, ...]] = {
    "longbench": tuple(longbench.KINDS),
    "longbench_e": tuple(name for name, kind in longbench.KINDS.items() if kind.extended),
    "infinitebench": tuple(infinitebench.KINDS),
    "loogle": tuple(loogle.KINDS),
}
BENCHMARKS = (*_NAMES, "gsm8k", "mmlu_pro")


class BenchmarkTask(Task):
    """One published data set with its prompt, answer length and metric; read when the samples are asked for.

    Args:
        benchmark: one of `BENCHMARKS`.
        name: the data set or category; empty where the benchmark is one data set.
        options: `data` is a folder (or file) of published files, read instead of the Hub; `max_length` is the most
            tokens of a prompt, kept by leaving out its middle; `max_new_tokens` replaces the published answer length.

    Raises:
        DataError: the name or an option is unknown.
    """

    def __init__(self, benchmark: str, name: str, options: Mapping[str, str]) -> None:
        self.benchmark, self.name = benchmark, name
        spec = f"{benchmark}:{name}" if name else benchmark
        self.names = (spec,)
        if benchmark in _NAMES and name not in _NAMES[benchmark]:
            raise DataError(f"unknown task '{spec}'; {benchmark} has: {', '.join(_NAMES[benchmark])}")
        if benchmark == "gsm8k" and name:
            raise DataError(f"unknown task '{spec}'; gsm8k is one data set")
        if unknown := sorted(options.keys() - {"data", "max_length", "max_new_tokens"}):
            raise DataError(
                f"task '{spec}' has no option '{unknown[0]}'; its options: data, max_length, max_new_tokens"
            )
        self._data = Path(options["data"]) if "data" in options else None
        self._max_length, self._max_new = (_number(options, key, spec) for key in ("max_length", "max_new_tokens"))

    def check(self) -> None:
        """Asks for the first question, so that data that cannot be had is known before a backbone is loaded.

        Raises:
            DataError: there is none.
        """
        if not list(islice(self._parts(), 1)):
            raise DataError(f"{self.names[0]} has no questions")

    def samples(
        self, tokenizer: PreTrainedTokenizerBase, max_positions: int, limit: int | None, seed: int
    ) -> list[Sample]:
        """The first `limit` questions, in the published order."""
        new_tokens, metric, chat = self._kind()
        try:
            listed = list(islice(self._parts(), limit))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{self.names[0]}: a row is not in the published schema ({type(error).__name__}: {error})"
            ) from None
        return [
            Sample(
                task=self.names[0] + (f"/{one.group}" if one.group else ""),
                index=i,
                context=one.context,
                question=one.after,
                answer_prefix="",
                answers=one.answers,
                max_new_tokens=self._max_new or new_tokens,
                metric=metric,
                chat=chat,
                separator="",
                classes=one.classes,
                max_length=self._max_length,
            )
            for i, one in enumerate(listed)
        ]

    def _kind(self) -> tuple[int, str, bool]:
        """Published answer length, metric, and whether the chat template is applied."""
        if self.benchmark in ("longbench", "longbench_e"):
            kind = longbench.KINDS[self.name]
            return kind.max_new_tokens, kind.metric, kind.chat
        if self.benchmark == "infinitebench":
            one = infinitebench.KINDS[self.name]
            return one.max_new_tokens, one.metric, True
        if self.benchmark == "loogle":
            return loogle.KINDS[self.name][1], loogle.KINDS[self.name][2], True
        if self.benchmark == "gsm8k":
            return shots.GSM8K_TOKENS, "gsm8k", False
        return shots.MMLU_PRO_TOKENS, "mmlu_pro", False

    def _parts(self) -> Iterable[Parts]:
        name = self.name
        if self.benchmark == "longbench":
            return (longbench.parts(name, row) for row in self._rows(longbench.REPOSITORY, name, "test"))
        if self.benchmark == "longbench_e":
            rows = self._rows(longbench.REPOSITORY, f"{name}_e", "test")
            return (longbench.extended_parts(name, row) for row in rows)
        if self.benchmark == "infinitebench":
            return (infinitebench.parts(name, row) for row in self._rows(infinitebench.REPOSITORY, None, name))
        if self.benchmark == "loogle":
            rows = self._rows(loogle.REPOSITORY, name, "test")
            return (parts for row in rows for parts in loogle.all_parts(name, row))
        if self.benchmark == "gsm8k":
            train = self._rows(shots.GSM8K, "main", "train")
            return (shots.gsm8k_parts(row, train) for row in self._rows(shots.GSM8K, "main", "test"))
        validation = self._rows(shots.MMLU_PRO, None, "validation")
        rows = [row for row in self._rows(shots.MMLU_PRO, None, "test") if name in ("", row["category"])]
        if not rows:
            raise DataError(f"{self.names[0]}: no question of category '{name}'")
        return (shots.mmlu_pro_parts(row, validation) for row in rows)

    def _rows(self, repository: str, config: str | None, split: str) -> list[Row]:
        """Rows of one split; a local file is called as the Hub's data set or split is."""
        if self._data is None:
            return hub_rows(repository, config, split, self.names[0])
        named = [split] if config in (None, "main") else [config, split]
        return local_rows(self._data, named, self.names[0])


def _number(options: Mapping[str, str], key: str, spec: str) -> int | None:
    text = options.get(key)
    if text is None:
        return None
    if not text.isdecimal() or not int(text):
        raise DataError(f"task '{spec}': {key}={text} is not a whole number of at least 1")
    return int(text)
