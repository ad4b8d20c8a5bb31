"""Communication along named mesh dimensions for PyTorch. Errors name the rank, the call and the line."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshcomm.comm import Handle as Handle
    from meshcomm.config import Config as Config
    from meshcomm.config import MeshConfig as MeshConfig
    from meshcomm.config import load_config as load_config
    from meshcomm.config import plan as plan
    from meshcomm.errors import MeshcommError as MeshcommError
    from meshcomm.layout import GroupOptions as GroupOptions
    from meshcomm.layout import Layout as Layout
    from meshcomm.layout import Plan as Plan
    from meshcomm.mesh import Mesh as Mesh
    from meshcomm.mesh import from_groups as from_groups
    from meshcomm.mesh import init as init
    from meshcomm.mesh import watch as watch
    from meshcomm.models import ModelSpec as ModelSpec
    from meshcomm.parallel import GradientSync as GradientSync
    from meshcomm.parallel import clip_grad_norm_ as clip_grad_norm_
    from meshcomm.parallel import tensor_parallel as tensor_parallel
    from meshcomm.pattern import explain_pattern as explain_pattern
    from meshcomm.simulator import simulate as simulate
    from meshcomm.train import Trainer as Trainer
    from meshcomm.transfer.explain import explain_transfer as explain_transfer
    from meshcomm.transfer.link import link as link

__version__ = "0.1.0"

# Every public name, by module. A module is loaded on first use, so names that do not need torch do not import it.
_FOLDERS = {
    "comm": ("Handle",),
    "config": ("Config", "MeshConfig", "load_config", "plan"),
    "errors": ("MeshcommError",),
    "layout": ("GroupOptions", "Layout", "Plan"),
    "mesh": ("Mesh", "from_groups", "init", "watch"),
    "models": ("ModelSpec",),
    "parallel": ("GradientSync", "clip_grad_norm_", "tensor_parallel"),
    "pattern": ("explain_pattern",),
    "simulator": ("simulate",),
    "train": ("Trainer",),
    "transfer.explain": ("explain_transfer",),
    "transfer.link": ("link",),
}
_PUBLIC = {name: f"meshcomm.{folder}" for folder, names in _FOLDERS.items() for name in names}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshcomm' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


# What a notebook shows as tables or as a picture. By name, because neither these types nor their views are loaded yet.
_SHOWN = {
    "text/html": (
        *("layout.plan.Plan", "mesh.mesh.Mesh", "mesh.stats.Stats"),
        *("mesh.all_ranks.StatsOfAll", "mesh.all_ranks.Stragglers", "transfer.explain.TransferCost"),
    ),
    "image/svg+xml": ("layout.layout.Layout",),
}


def load_ipython_extension(shell: Any) -> None:
    """Let a notebook show meshes and tables. Called by `%load_ext meshcomm`, and below if a notebook imports meshcomm."""
    for kind, names in _SHOWN.items():
        formatter = shell.display_formatter.formatters[kind]
        for name in names:
            formatter.for_type_by_name(*f"meshcomm.{name}".rsplit(".", 1), _in_a_notebook)


def _in_a_notebook(what: Any) -> str:
    shown: str = import_module("meshcomm.show.notebook").shown(what)
    return shown


if (_shell := getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()) is not None:
    load_ipython_extension(_shell)
