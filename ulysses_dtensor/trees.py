"""Walking nested arguments and results: torch's own pytree, which has no public name, taken from here alone.

If a new torch moves it, every import of this module fails; `torch.utils.pytree` is where it would go.
"""

from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_map, tree_unflatten

__all__ = ["TreeSpec", "keystr", "tree_flatten", "tree_flatten_with_path", "tree_map", "tree_unflatten"]
