"""The samples that a rank trains on at a step: the same global batch on every mesh."""

from meshcomm.train.data.batches import Batches, Data, GivenBatches, batches_of, placed
from meshcomm.train.data.corpus import Corpus, DataPart, Stream
from meshcomm.train.data.load import load

__all__ = ["Batches", "Corpus", "Data", "DataPart", "GivenBatches", "Stream", "batches_of", "load", "placed"]
