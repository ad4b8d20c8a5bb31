"""A share of the data is cut off for validation."""

from __future__ import annotations

import pytest

from meshcomm.errors import TrainingError
from meshcomm.train.data import Corpus, Stream
from tests.train.data.test_batches import ABC, TEXT, batches


def test_a_share_for_validation_is_cut_off_the_end_and_never_trained_on() -> None:
    corpus = ABC.cut(0.1)
    held = corpus.validation
    assert held is not None and (corpus.samples, held.samples) == (128, 14)
    trained = {tuple(row) for step in range(1, 12) for row in batches(corpus=corpus)(step)[0].tolist()}
    evaluated = [tuple(row) for tokens, _ in batches(corpus=held).in_order(None) for row in tokens.tolist()]
    assert len(evaluated) == 12  # whole global batches
    assert evaluated[0][0] == 128 * 7 % 256 and len(trained) == 128
    with pytest.raises(TrainingError, match="no samples remain for training"):
        Corpus((Stream(TEXT[:8], 7),), b"").cut(0.5)
