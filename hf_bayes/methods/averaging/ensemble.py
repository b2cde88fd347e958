"""Deep ensemble: independent MAP runs (Lakshminarayanan, Pritzel and Blundell 2017; posteriors section 4.2).

Each member is ``map``: AdamW on U / N, no noise. What tells members apart is the start (``init_jitter``, fresh LoRA
factors) and the order of its minibatches. posteriors' parallel SGMCMC is this with the noise of T > 0 put back (eq. 5):
``sghmc`` with one draw per chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hf_bayes.core.config import MethodConfig
from hf_bayes.methods.averaging.map import MAPConfig


@dataclass(frozen=True, kw_only=True)
class EnsembleConfig(MAPConfig):
    """``num_chains`` MAP runs, each an equally weighted member."""

    name: ClassVar[str] = "ensemble"
    num_chains: int = MethodConfig.num_chains
    init_jitter: float = MethodConfig.init_jitter
