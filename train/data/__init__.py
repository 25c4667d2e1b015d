"""Data modules, for `class_path` in a configuration."""

from train.data.base import TextDataModule
from train.data.hub import HubDataset, RedPajama, RedPajamaV2
from train.data.local import BuiltinCorpus, LocalFiles

__all__ = ["BuiltinCorpus", "HubDataset", "LocalFiles", "RedPajama", "RedPajamaV2", "TextDataModule"]
