"""Deep ensemble: independent MAP runs (Lakshminarayanan, Pritzel and Blundell 2017; posteriors section 4.2).

Each member is ``map``: AdamW on U / N without noise. Members differ in their start (``init_jitter``, new LoRA factors)
and in the order of their minibatches. The parallel SGMCMC of posteriors adds the noise of T > 0 to this (eq. 5); here
it is ``sghmc`` with one draw per chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.averaging.map import MAPConfig


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(MAPConfig):
    """An ensemble of ``num_chains`` MAP runs, with equal weights."""

    name: ClassVar[str] = "ensemble"
    num_chains: int = MethodConfig.num_chains
    init_jitter: float = MethodConfig.init_jitter
