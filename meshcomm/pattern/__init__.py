"""einops patterns in which a mesh dim's name says where it lies in the local tensor.

Three stages, each of use without the next: `parse` (text -> sides), `plan` (sides, sizes, shape ->
a Recipe of steps), `apply` (recipe, tensor, communicators). All but `apply` are pure.
"""

from meshcomm.pattern.explain import explain_pattern
from meshcomm.pattern.recipe import Recipe

__all__ = ["Recipe", "explain_pattern"]
