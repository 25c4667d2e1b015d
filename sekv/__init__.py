"""Trainable KV-cache compression for frozen language models."""

__version__ = "0.1.0"
