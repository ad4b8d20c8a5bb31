"""einops patterns in which the name of a mesh dim marks where the local tensor is split along that dim.

There are four stages, each usable without the next: `parse` (text -> sides), `roles` (sides, mesh, shape -> role of
each dim), `plan` (-> a Recipe of steps), `apply` (recipe, tensor, communicators). All except `apply` are pure.
"""

from meshcomm.pattern.plan import explain_pattern
from meshcomm.pattern.recipe import Recipe, RecipeStep

__all__ = ["Recipe", "RecipeStep", "explain_pattern"]
