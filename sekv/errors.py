"""Errors whose message is written for the person at the keyboard: it names the thing at fault and the remedy."""


class SeKVError(ValueError):
    """Base of every error the command line reports in one line (exit code 2) instead of a traceback."""


class BackboneError(SeKVError):
    """The backbone cannot be found, loaded, or compressed."""


class BudgetError(SeKVError):
    """The budget is malformed or cannot hold the memory it is asked to hold."""


class PolicyError(SeKVError):
    """A policy, one of its options, or what it needs to run is unknown or out of range."""


class AdapterError(SeKVError):
    """An adapter is missing, corrupt, or belongs to another backbone."""


class DataError(SeKVError):
    """A corpus, task, or context is missing, empty, or malformed."""
