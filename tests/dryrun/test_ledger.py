"""A ledger counts storages while they live."""

from __future__ import annotations

import json

import torch

from meshcomm.dryrun.ledger import Ledger
from tests.dryrun.measured import Watched


def test_a_ledger_counts_storages_while_they_live() -> None:
    ledger = Ledger(lambda: ("forward 0", True))
    with Watched(ledger):
        x = torch.zeros(100)
        view = x[10:]
        y = x + 1
        assert ledger.live == 800
        del x
        assert ledger.live == 800
        del view
        assert ledger.live == 400
        ledger.call_it("weights", [y])
        y.untyped_storage().resize_(0)
        assert ledger.live == 0
        y.untyped_storage().resize_(1200)
    peak = ledger.peak()
    assert (ledger.live, peak.nbytes, peak.operator) == (1200, 1200, "resize_")
    assert peak.parts["weights"] == 1200 and peak.at.startswith(__file__)
    assert json.dumps(peak.parts)
