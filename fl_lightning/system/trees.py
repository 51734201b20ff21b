"""Trees of tensors: tuples, lists and dicts in each other, Gaussians and clients' memories among them.

This module alone imports `torch.utils._pytree`, because torch has no public name for it. `torch.func` walks through the
same trees, so a class that vmap is to see must be registered there. `optree`, a public package, sorts the keys of a
dict and would misread what older checkpoints hold.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree

Attribute = _pytree.GetAttrKey
Position = _pytree.SequenceKey

register = _pytree.register_pytree_node
leaves = _pytree.tree_leaves
flatten = _pytree.tree_flatten
flatten_with_path = _pytree.tree_flatten_with_path
unflatten = _pytree.tree_unflatten
structure = _pytree.tree_structure
map_leaves = _pytree.tree_map
path_text = _pytree.keystr
structure_as_text = _pytree.treespec_dumps
structure_from_text = _pytree.treespec_loads


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with a function applied to its tensors; other leaves stay.

    >>> map_tensors(Tensor.double, {"rounds": 3})
    {'rounds': 3}
    """
    return _pytree.tree_map_only(Tensor, function, tree)
