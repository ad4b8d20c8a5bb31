"""einops patterns in which a mesh dim's name says where it lies in the local tensor.

Four stages, each of use without the next: `parse` (text -> sides), `roles` (sides, mesh, shape -> what each
dim does), `plan` (-> a Recipe of steps), `apply` (recipe, tensor, communicators). All but `apply` are pure.
"""

from meshcomm.pattern.plan import explain_pattern
from meshcomm.pattern.recipe import Recipe, RecipeStep

__all__ = ["Recipe", "RecipeStep", "explain_pattern"]
