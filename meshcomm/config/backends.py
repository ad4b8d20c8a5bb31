"""Which backend will a dim have, as far as the file alone says, and can it do what is asked?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from meshcomm.config.problems import Broken, Problem, either
from meshcomm.config.wording import key_path, toml

if TYPE_CHECKING:
    from meshcomm.config.mesh import MeshConfig

# What "auto" is on a device.
DEFAULTS: Final = {"cpu": "gloo", "cuda": "nccl"}

_NAME = "[a-z][a-z0-9_-]*"
_EXPECTED = 'auto, a backend\'s name in lower case, or device:name pairs as in "cpu:gloo,cuda:nccl"'


def backends(text: str) -> dict[str, str] | None:
    """Device type -> backend, "" for any device; None where the text is no backend.

    >>> backends("gloo"), backends("cpu:gloo,cuda:nccl")
    ({'': 'gloo'}, {'cpu': 'gloo', 'cuda': 'nccl'})
    """
    if re.fullmatch(_NAME, text):
        return {"": text}
    if not re.fullmatch(f"{_NAME}:{_NAME}(,{_NAME}:{_NAME})*", text):
        return None
    pairs = [pair.partition(":")[::2] for pair in text.split(",")]
    by_device = dict(pairs)
    return by_device if len(by_device) == len(pairs) else None


def chosen(mesh: MeshConfig, backend: str) -> str | None:
    """The backend that a group gets, or None where the process decides that at its start."""
    by_device = backends(backend) or {}
    device = "" if mesh.device == "auto" else mesh.device
    name = by_device.get(device, by_device.get("", "auto"))
    if name == "auto":
        return DEFAULTS.get(device)
    return name


def may_use_nccl(mesh: MeshConfig) -> bool:
    """Whether some group of the mesh may run on NCCL."""
    options = [mesh.backend, *(o.backend for o in mesh.options.values() if o.backend is not None)]
    return any(chosen(mesh, backend) in (None, "nccl") for backend in options)


def backend_problems(mesh: MeshConfig, broken: Broken) -> Iterator[Problem]:
    """Backends that do not exist as written, or do not fit the device or the options."""
    if broken.touches("device"):
        return
    if not re.fullmatch("[a-z][a-z0-9_]*", mesh.device):
        plain = re.match("[a-z][a-z0-9_]*", mesh.device.lower())
        yield Problem(
            "device",
            f"{toml(mesh.device)} is not a device type",
            given=f"device = {toml(mesh.device)}",
            expected="auto, cpu, cuda, or another of torch's device types, without an index",
            hint=f'mesh.device = "{plain.group() if plain else "auto"}"',
        )
        return
    if not broken.touches("backend"):
        yield from _one_backend(mesh, "backend", mesh.backend)
    for name, options in mesh.options.items():
        path = key_path(["options", name])
        if options.backend is not None and not broken.touches(f"{path}.backend"):
            yield from _one_backend(mesh, f"{path}.backend", options.backend)
        if options.high_priority and not broken.touches("backend", path):
            yield from _high_priority(mesh, path, options.backend or mesh.backend)


def _one_backend(mesh: MeshConfig, key: str, backend: str) -> Iterator[Problem]:
    by_device = backends(backend)
    if by_device is None:
        lower = backend.lower().replace(" ", "")
        yield Problem(
            key,
            f"{toml(backend)} is not a backend",
            given=f"backend = {toml(backend)}",
            expected=_EXPECTED,
            hint=f'mesh.{key} = "{lower if backends(lower) else "auto"}"',
        )
    elif mesh.device != "auto" and "" not in by_device and mesh.device not in by_device:
        near = "gloo" if mesh.device == "cpu" else "nccl"
        yield Problem(
            key,
            f"no backend for device {mesh.device}",
            given=f'backend = {toml(backend)}, mesh.device = "{mesh.device}"',
            expected=f"a backend for {mesh.device}",
            hint=f'mesh.{key} = "{mesh.device}:{near},{backend}"',
        )
    elif mesh.device == "cpu" and chosen(mesh, backend) == "nccl":
        yield Problem(
            key,
            "nccl does not run on device cpu",
            given=f'backend = {toml(backend)}, mesh.device = "cpu"',
            expected="gloo on cpu, nccl on cuda",
            hint=either([f'mesh.{key} = "gloo"', 'mesh.device = "cuda"']),
        )


def _high_priority(mesh: MeshConfig, path: str, backend: str) -> Iterator[Problem]:
    name = chosen(mesh, backend)
    if backends(backend) is None or name in (None, "nccl"):
        return
    yield Problem(
        f"{path}.high_priority",
        f"no effect: {name} has no high-priority streams",
        given=f'high_priority = true, backend = {toml(backend)}, mesh.device = "{mesh.device}"',
        expected="high_priority only where the backend is nccl",
        hint=either(
            [f"remove mesh.{path}.high_priority", f'mesh.{path}.backend = "nccl" and mesh.device = "cuda"']
        ),
    )
