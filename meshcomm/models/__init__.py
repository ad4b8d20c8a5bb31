"""The models that a configuration can name, and ModelSpec, which describes any other model."""

from meshcomm.models.build import model_of
from meshcomm.models.spec import Attend, ModelSpec, StageContext

__all__ = ["Attend", "ModelSpec", "StageContext", "model_of"]
