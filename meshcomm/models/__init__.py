"""Models that a configuration can name, and what any other must say about itself."""

from meshcomm.models.build import model_of
from meshcomm.models.spec import Attend, Here, ModelSpec

__all__ = ["Attend", "Here", "ModelSpec", "model_of"]
