"""The methods: what each keeps of a context, and how to name one."""

from sekv.policies.base import FullPolicy, Policy, compress
from sekv.policies.registry import available_policies, build_policy, register, split_specs
from sekv.policies.scorer import ScorerPolicy

__all__ = [
    "FullPolicy",
    "Policy",
    "ScorerPolicy",
    "available_policies",
    "build_policy",
    "compress",
    "register",
    "split_specs",
]
