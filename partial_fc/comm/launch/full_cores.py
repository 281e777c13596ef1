"""What MPI is told where the processes of a host fill its cores: a process that waits in MPI asks again and again, and
keeps a core busy with it, which is then taken from one that computes."""

from collections.abc import Mapping

from partial_fc.comm.launch import Launch, integer

YIELD = "OMPI_MCA_mpi_yield_when_idle"


def settings(launch: Launch, num_cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to be set before MPI starts in this process. num_cores: that it may use. What the user has set is left
    alone. (mpirun does the same where there are more processes than slots; it knows nothing of threads.)"""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" not in environ or environ.get(YIELD):
        return {}
    # Without the variable processes divide the cores among them; "4,2" is OpenMP's for nested threads.
    given = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    num_threads = integer("OMP_NUM_THREADS", given) if given else max(1, num_cores // launch.local_size)
    return {YIELD: "1"} if launch.local_size * num_threads >= num_cores else {}
