"""Every key that meshcomm sets in a job's store outside the prefix of a mesh."""

from typing import Final

# In a store that rank 0 serves: the names of the job, of rank 0's process, and of its parent.
JOB: Final = "meshcomm/job"
# The process that has a rank, in the file of a FileStore, and in any store.
PROCESS: Final = "meshcomm/process/{}"
OWNER: Final = "meshcomm/owner/{}"
# Processes that claimed the rank of another process, one per line.
TWICE: Final = "meshcomm/twice"
# How many ranks have printed their error under a launcher other than meshcomm's.
SPOKE: Final = "meshcomm/spoke"
# How many meshes, watches and examinations a rank has opened.
OPENED: Final = "meshcomm/opened/{}"
WATCHED: Final = "meshcomm/watched/{}"
EXAMINED: Final = "meshcomm/doctor/{}"
# In the default group's store: the prefix of the mesh that created the group.
PREFIX: Final = "meshcomm/prefix"
# The announcement of a generation. Set when all of its ranks have arrived.
GENERATION: Final = "meshcomm/generation/{}"
MET: Final = "meshcomm/generation/{}/met"
# Set by a process that waits for a generation. Contains the numbers of the generation and the process.
WAITS: Final = "meshcomm/waits/{}/{}"
# The hung processes of a generation, as found by its ranks. Each line has a process and its activity.
HUNG: Final = "meshcomm/hung/{}"
# The decision on how the generation before ends: with a larger mesh, or with the end of the program.
NEXT: Final = "meshcomm/next/{}"
# Set when the work of the program is done.
ENDED: Final = "meshcomm/ended"
# A random name of the job, which it has at the addresses where it meets others; and how often its ranks have met them.
LINKS: Final = "meshcomm/links/name"
LINKED: Final = "meshcomm/links/count"
