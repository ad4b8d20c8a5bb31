"""The samples that each rank trains on in a step. The global batch is the same on every mesh."""

from meshcomm.train.data.batches import Batches, batches_of
from meshcomm.train.data.corpus import Corpus, DataPart, Stream
from meshcomm.train.data.given import (
    STATE,
    Data,
    GivenBatch,
    GivenBatches,
    check_batches,
    check_data,
    check_lengths,
    placed,
    takes_one,
)
from meshcomm.train.data.load import load
from meshcomm.train.data.workers import ReadAhead

__all__ = [
    "STATE",
    "Batches",
    "Corpus",
    "Data",
    "DataPart",
    "GivenBatch",
    "GivenBatches",
    "ReadAhead",
    "Stream",
    "batches_of",
    "check_batches",
    "check_data",
    "check_lengths",
    "load",
    "placed",
    "takes_one",
]
