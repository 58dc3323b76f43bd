"""Changes to modules (sharding, precision, recomputation), and public layers, which load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dream_trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from dream_trainer.parallel.mixture_of_experts import (
        ExpertExchange as ExpertExchange,
        GatedExperts as GatedExperts,
        MoE as MoE,
        SharedExperts as SharedExperts,
        split_experts as split_experts,
    )
    from dream_trainer.parallel.tensor_layers import declare_random_layer as declare_random_layer
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
