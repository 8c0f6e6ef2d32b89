"""The backend's entry: Megatron-Core, imported without what it says about each optional library that isn't there."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from towline.learner.megatron.learner import MegatronLearner

__all__ = ["MegatronLearner"]
