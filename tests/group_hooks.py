"""A mark for tests of calls outside the mesh, which need torch's hooks of process groups."""

from __future__ import annotations

from typing import Final

import pytest
import torch
import torch.distributed as dist

HAS_HOOKS: Final = hasattr(dist.ProcessGroup, "register_pre_hook")
needs_group_hooks = pytest.mark.skipif(not HAS_HOOKS, reason=f"torch {torch.__version__} has no group hooks")
