"""How a pass runs, and what it leaves on disk: precision of products, compilation, recomputation, streaming, memory,
plans, seeds, folders of tensors.

May import: errors, notices.
"""

from dualweaver.compute.plan import Plan

__all__ = ["Plan"]
