"""The method on tensors: surrogates and reconstruction (`weaver`), fusion, context filter, influence of channels.

May import: errors.
"""

from dualweaver.method.context_filter import FILTER_SHARES, FILTER_STRENGTH, ContextFilter
from dualweaver.method.fusion import FUSIONS, CNNFusion, MLPFusion, fusion_width, make_fusion
from dualweaver.method.weaver import Weaver, surrogate_bound

__all__ = [
    "FILTER_SHARES",
    "FILTER_STRENGTH",
    "FUSIONS",
    "CNNFusion",
    "ContextFilter",
    "MLPFusion",
    "Weaver",
    "fusion_width",
    "make_fusion",
    "surrogate_bound",
]
