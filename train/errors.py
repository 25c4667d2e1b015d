"""Errors of training, in the library's manner: one line that names the thing at fault and the remedy."""

from __future__ import annotations

from sekv.errors import SeKVError


class ConfigError(SeKVError):
    """A value of the training configuration is out of range."""


class DivergenceError(SeKVError):
    """Training produced a loss or a gradient that is not finite."""
