"""`mesh.elastic`: continues a mesh after ranks were lost and replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from meshcomm.errors import CommunicationError, LaunchError, RankLost, UnsupportedOp
from meshcomm.mesh.runtime import WORLD
from meshcomm.rendezvous.generation import Generation
from meshcomm.transport.torch_changes import changed

if TYPE_CHECKING:
    from meshcomm.mesh.mesh import Mesh


@final
class Elastic:
    """Continues a mesh whose ranks were lost and replaced, under a launcher that replaces them. See docs/guide/elastic.md."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    @property
    def generation(self) -> Generation:
        """How often the job lost and replaced ranks before this mesh was opened, and which ranks are new."""
        return self._mesh._state.generation

    @property
    def recovers(self) -> bool:
        """Whether the launcher replaces lost ranks, so that `reopen` can connect to the new processes."""
        return self._mesh._state.generations is not None

    def lost(self, error: BaseException | None = None) -> RankLost | None:
        """Return a RankLost error if ranks were lost and replaced since this mesh was opened, otherwise None.

        error: the exception that interrupted the step. After a communication error, `lost` waits up to five seconds
               for the launcher to announce a replacement.
        """
        return self._mesh._state.lost(error)

    def reopen(self, error: BaseException | None = None) -> Generation:
        """Rebuild this mesh, with new groups over all ranks of the job, after lost ranks were replaced.

            except Exception as error:
                mesh.elastic.reopen(error)      # raises `error` if no rank was lost and replaced

        Calls in flight are abandoned. Names, dims and coords stay valid. Torch DeviceMeshes and DTensors of
        this mesh also stay valid, because the new groups keep the names of the old ones. Recreate groups made by
        `create_group` or `dist.new_group`, and objects that hold such a group; see docs/guide/elastic.md.

        error:     the exception that interrupted the step. If it is not due to a lost rank, `reopen` raises it again.
                   After a communication error, `reopen` waits up to five seconds for the launcher to announce a
                   replacement.
        Called by: every surviving rank. The new processes call `meshcomm.init`.
        Returns:   the new generation, which records the new ranks.
        Raises:    LaunchError if the launcher does not replace ranks; UnsupportedOp if the mesh did not create
                   the default group; any error of `meshcomm.init`.
        """
        mesh, state = self._mesh, self._mesh._state
        if state.closed or state.generations is None:
            raise error or LaunchError(
                f"this job does not replace lost ranks, so there is nothing to reopen, on {state.label}",
                given="mesh.elastic.reopen()",
                expected="a launcher that replaces lost ranks",
                hint="meshcomm run --replace 3 CONFIG script.py",
            )
        if state.lost(error) is None:
            if error is not None:
                raise error
            return state.generation
        if (reopen := state.reopen) is None:
            raise UnsupportedOp(
                f"this mesh uses a default group that it did not create, and cannot be reopened, on {state.label}",
                given="torch.distributed was initialized before meshcomm.init",
                expected="a program with one mesh, which creates the default group",
                hint="meshcomm.init in place of torch.distributed.init_process_group; mesh.group(dim) where torch needs a group",
            ) from error
        # Other threads may wait for calls that ranks were lost in, until the mesh is open again.
        put_back = changed() if WORLD.get() is None else lambda: None
        try:
            state.abandon()
            mesh._live(reopen())
        finally:
            put_back()
        return self.generation

    def finish(self, *, ends: bool = True) -> None:
        """Block until every rank has called `finish`. After that, no rank can join the mesh, and ranks may exit.

        ends:      whether the program's work is done. If so, and a signal then ends a rank, the job does not fail.
        Called by: every rank of the mesh, at the end of a program that reopens the mesh, when all results are saved.
                   `meshcomm train` calls `finish` itself.
        Raises:    RankLost if a rank joins the mesh first.
        """
        from meshcomm.mesh.all_ranks import is_first, of_every_rank

        mesh, state = self._mesh, self._mesh._state
        of_every_rank(mesh, None)
        generations = state.generations
        if generations is None:
            return
        grows = not generations.all_done(ends) if is_first(mesh) else False
        try:
            grows = any(of_every_rank(mesh, grows))
        except CommunicationError:
            # A rank may have been lost after the end.
            if not generations.has_ended:
                raise
        if grows and (error := generations.lost(state.label, True)) is not None:
            raise error
