"""A launcher that runs no process itself: `python -m tests.elastic.parted ADDRESS FOLDER CONFIG`.

It serves the store of a job of 4 ranks and writes its port into FOLDER/port. Processes named in FOLDER/lost count as lost, as
if a cluster reported that their host no longer answers.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshcomm.config import load_config
from meshcomm.job.replacing import Replacing, sizes_of
from meshcomm.watching.ending import Failure


def main() -> None:
    """Wait until FOLDER/lost exists, announce the loss, and then wait to be killed."""
    address, folder, settings = sys.argv[1], Path(sys.argv[2]), load_config(sys.argv[3])
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    replacing = Replacing(4, settings.elastic, sizes_of(settings, 4))
    replacing.store = store
    (folder / "half").write_text(str(store.port))
    (folder / "half").rename(folder / "port")
    while not (folder / "lost").exists():
        time.sleep(0.05)
    lost = {
        each: Failure(each, f"rank {each}", time.time(), "is on a host that does not answer", raised=False)
        for each in map(int, (folder / "lost").read_text().split())
    }
    assert replacing.lost(lost, False)
    time.sleep(600)


if __name__ == "__main__":
    main()
