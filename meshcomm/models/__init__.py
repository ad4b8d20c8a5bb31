"""Models that a configuration can name, and ModelSpec, which describes any other."""

from meshcomm.models.build import model_of
from meshcomm.models.spec import Attend, Here, ModelSpec

__all__ = ["Attend", "Here", "ModelSpec", "model_of"]
