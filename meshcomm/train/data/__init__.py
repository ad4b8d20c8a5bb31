"""The samples that each rank trains on in a step. The global batch is the same on every mesh."""

from meshcomm.train.data.batches import Batches, Source, batches_of
from meshcomm.train.data.corpus import Corpus, DataPart, Stream
from meshcomm.train.data.load import load
from meshcomm.train.data.loader import (
    STATE,
    Data,
    UserBatches,
    check_data,
    check_lengths,
    takes_one,
    user_batches,
)

__all__ = [
    "STATE",
    "Batches",
    "Corpus",
    "Data",
    "DataPart",
    "Source",
    "Stream",
    "UserBatches",
    "batches_of",
    "check_data",
    "check_lengths",
    "load",
    "takes_one",
    "user_batches",
]
