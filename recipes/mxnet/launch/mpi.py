"""mpirun, which starts the processes itself."""

import os
import secrets
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence

from partial_fc.comm.launch.hosts import Host

from . import shell
from .job import Plan, Task, own_interface

_OPEN_MPI_SSH = "OMPI_MCA_plm_rsh_args"
_SESSIONS = "OMPI_MCA_orte_top_session_dir"
# Each of mpirun's processes runs this, with its role as $1, and reports its exit itself: mpirun knows only a number. It
# ends with its parent: a killed mpirun leaves the processes of its own host.
_UNDER_MPI = """
role=$1 number=$OMPI_COMM_WORLD_RANK
shift
export DMLC_TASK_ID="$number"
{prepare}
(while kill -s 0 "$PPID"; do sleep 1; done; kill -s KILL 0) >/dev/null 2>&1 &
guard=$!
"$@"
status=$?
kill "$guard"
[ "$status" = 0 ] || echo "$role $number on $(hostname) ended with exit status $status" >&2
exit "$status"
"""


def check_open_mpi() -> None:
    """Raises ValueError without Open MPI's mpirun."""
    try:
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True)
    except OSError:
        raise ValueError("--launcher mpi needs mpirun: install Open MPI, or use --launcher ssh") from None
    if "Open MPI" not in done.stdout:
        raise ValueError(f"mpirun --version says {done.stdout[:80]!r}; expected Open MPI; or use --launcher ssh")


def mpirun(plan: Plan, tasks: Sequence[Task], command: Sequence[str], folder: str) -> tuple[dict[str, str], list[str]]:
    """Returns (variables, words) of the mpirun that starts these tasks, all of one role, on these hosts.

    Values of variables are on no command line, where all users of the hosts could read them.
    """
    role, places = tasks[0].role, [task.place for task in tasks]
    own = {"DMLC_TASK_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    variables = {name: value for name, value in tasks[0].variables.items() if name not in own}
    names = [*variables, "PATH"]
    slots = [f"{host.name}:{num}" for host, num in Counter(places).items()]
    words = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", str(len(tasks)), "--host", ",".join(slots)]
    words += [word for name in names for word in ("-x", name)]
    prepare = "\n".join(own_interface(variables, list(plan.addresses.values())))
    within = ["sh", "-c", _UNDER_MPI.format(prepare=prepare).strip(), "sh", role]
    return variables | _mpi_ssh(places) | _mpi_sessions(), [*words, "-wdir", folder, *within, *command]


def _mpi_ssh(places: Sequence[Host]) -> dict[str, str]:
    """Returns the options of mpirun's ssh. Raises ValueError for hosts with different ports."""
    ports = {host.ssh_port for host in places if not host.is_here}
    if len(ports) > 1:
        raise ValueError("mpirun's ssh has one port for all hosts: write host:port with the same one, or ~/.ssh/config")
    port = next(iter(ports), None)
    options = os.environ.get(_OPEN_MPI_SSH) or shlex.join(shell.SSH_OPTIONS)
    return {_OPEN_MPI_SSH: options + (f" -p {port}" if port else "")}


def _mpi_sessions() -> dict[str, str]:
    """Sets Open MPI's session folder: concurrent mpirun delete each other's empty /tmp/ompi.HOST.USER."""
    if any(os.environ.get(name) for name in ("TMPDIR", "OMPI_MCA_orte_tmpdir_base", _SESSIONS)):
        return {}
    return {_SESSIONS: f"/tmp/ompi.run.{secrets.token_hex(4)}"}
