"""The pytest plugin. Tests marked `mesh` run on every rank of a mesh; docs/guide/simulator.md explains how to use it.

pytest loads this file for every suite if meshcomm is installed. Therefore it imports only pytest, and does not affect
tests that do not use its `mesh` fixture.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from meshcomm.testing.marker import MeshRequest
    from meshcomm.testing.pool import Pool

_MARKER = (
    'mesh(via="simulator" | "gloo" | "emulated_nccl", timeout_s=60, **dims_and_keywords_of_meshcomm_init): run the test, which takes '
    "the mesh fixture, on every rank of a mesh with these dims; see docs/guide/simulator.md of meshcomm"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --mesh-via and the setting mesh_preload."""
    parser.getgroup("meshcomm").addoption(
        "--mesh-via",
        choices=("simulator", "gloo", "emulated_nccl"),
        default=None,
        help="how to run every mesh test, regardless of its marker",
    )
    parser.addini(
        "mesh_preload",
        "modules to import once, before the ranks are forked, instead of on each rank",
        type="args",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Terminate the warm ranks."""
    started = sys.modules.get("meshcomm.testing.processes")
    if started is not None and started.POOL in config.stash:
        config.stash[started.POOL].close()


@pytest.fixture(scope="session")
def mesh_pool(pytestconfig: pytest.Config) -> Pool:
    """Return the session's meshcomm.testing.Pool of warm ranks, for tests that call meshcomm.init themselves."""
    from meshcomm.testing.processes import pool_of

    return pool_of(pytestconfig)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> MeshRequest:
    """Provide each rank's Mesh to a test marked `mesh`."""
    from meshcomm.errors import MeshcommError
    from meshcomm.testing.marker import read, vias

    marker = request.node.get_closest_marker("mesh")
    args, keywords = ((), {}) if marker is None else (marker.args, marker.kwargs)
    try:
        through = vias(keywords.get("via"), request.config.getoption("mesh_via"))
        mesh_request = read(args, keywords, getattr(request, "param", through[0]))
    except MeshcommError as error:
        pytest.fail(f"{type(error).__name__}: {error}", pytrace=False)
    if mesh_request.skip:
        pytest.skip(f"not through {mesh_request.via}: {mesh_request.skip}")
    return mesh_request


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one test for each entry of the marker's via, as in via=("simulator", "gloo")."""
    marker = metafunc.definition.get_closest_marker("mesh")
    if marker is None or "mesh" not in metafunc.fixturenames:
        return
    through = marker.kwargs.get("via")
    if isinstance(through, (tuple, list)) and metafunc.config.getoption("mesh_via") is None:
        metafunc.parametrize("mesh", [str(via) for via in through], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Run a mesh test's body on its ranks instead of in this process."""
    if "mesh" not in pyfuncitem.funcargs:
        return _without_mesh(pyfuncitem)
    request = pyfuncitem.funcargs["mesh"]
    # Another plugin may define a fixture with this name. Only our fixture loads the module that defines MeshRequest.
    marker = sys.modules.get("meshcomm.testing.marker")
    if marker is None or not isinstance(request, marker.MeshRequest):
        return None
    from meshcomm.errors import ConfigError, MeshTestError
    from meshcomm.testing.report import settle

    try:
        if request.via == "simulator":
            from meshcomm.testing import simulated

            ends = simulated.run(pyfuncitem, request)
        else:
            from meshcomm.testing import processes

            ends = processes.run(pyfuncitem, request, processes.pool_of(pyfuncitem.config))
    except (MeshTestError, ConfigError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        settle(request, ends)
        return True
    pytest.fail(problem, pytrace=False)


def _without_mesh(item: pytest.Function) -> Any:
    """Fail a test whose own marker has dims but which does not use the mesh, because the marker would have no effect."""
    for node, marker in item.iter_markers_with_node("mesh"):
        if node is item and marker.kwargs:
            pytest.fail(
                f"MeshTestError: {item.name} is marked mesh({', '.join(marker.kwargs)}=...) but takes no mesh\n"
                "  given:    a test without an argument `mesh`\n"
                f"  expected: def {item.originalname}(mesh): its body then runs on every rank\n"
                "  try:      the marker on the class or module, if only some of its tests take a mesh",
                pytrace=False,
            )
    return None
