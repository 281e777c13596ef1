"""The shell in front of each process, which ends it: here, on another host over ssh, or under mpirun.

The shell's command line is the same for all processes and has no secrets: the command and the values of variables come
through standard input, which no other user can read. Afterwards that input is the lifeline (supervisor.Command): a line
is a signal to forward; its end, also from a killed launcher or a lost ssh connection, ends the process and all its
children.
"""

import base64
import shlex
from collections.abc import Mapping, Sequence

from partial_fc.comm.launch.hosts import Host

SSH_OPTIONS = (
    *("-o", "BatchMode=yes"),  # never asks
    *("-o", "ConnectTimeout=15"),
    # Detects a broken connection after 15 to 20 seconds.
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)
# `read` takes single bytes, so that the following input is not lost.
_FIRST = 'read -r script; eval "$(printf %s "$script" | base64 -d)"'
_PATIENCE_S = 25  # for a heartbeat of the launcher, over a network
_NEXT_HERE = "read -r next <&3"
_NEXT_THERE = (  # POSIX's `read` has no time limit
    f'next=$(timeout {_PATIENCE_S} sh -c \'read -r line && echo "$line"\' <&3) && [ -n "$next" ]'
)

# Three shells. This one has the exit status, also of a process ended by a signal, which ssh would turn into 255. (Its
# own message, "Terminated", is discarded.)
_STATUS = """
exec 3<&0 </dev/null
{prepare}
command -v setsid >/dev/null || {{ echo "$(hostname) has no setsid (util-linux)" >&2; exit 127; }}
exec 4>&2 2>/dev/null
(exec setsid sh -c {command} 2>&4 4>&-)
exit "$?"
"""
# Becomes the process, the leader of a new session. (After a shell's & it would ignore SIGINT.)
_COMMAND = """
setsid sh -c {guard} guard "$$" >/dev/null 2>&1 &
exec 3<&- {command}
"""
# Reads the lifeline. $1: the process.
_GUARD = """
pid=$1
while {next}; do
    set -- $next
    if [ "$1" = beat ]; then kill -s 0 "$pid" || break; else kill -s "$1" -- "$2$pid"; fi
done
kill -s 0 "$pid" && kill -s TERM -- "-$pid"
tenths=0
while [ "$tenths" -lt 30 ] && kill -s 0 "$pid"; do
    sleep 0.1
    tenths=$((tenths + 1))
done
kill -s KILL -- "-$pid"
"""


def words(name: str, host: Host | None) -> list[str]:
    """Returns the command that starts the shell. name: as shown by `ps`. host: None is this one, without ssh."""
    if host is None:
        return ["sh", "-c", _FIRST, name]
    port = ["-p", str(host.ssh_port)] if host.ssh_port else []
    # Works in any login shell.
    return ["ssh", "-T", *SSH_OPTIONS, *port, "--", host.name, f"exec sh -c {shlex.quote(_FIRST)} {shlex.quote(name)}"]


def script(command: Sequence[str], prepare: Sequence[str], far: bool) -> str:
    """Returns the shell's script. prepare: lines before the command. far: on another host."""
    guard = _GUARD.format(next=_NEXT_THERE if far else _NEXT_HERE)
    within = _COMMAND.format(guard=shlex.quote(guard), command=shlex.join(command))
    return _STATUS.format(prepare="\n".join(prepare), command=shlex.quote(within))


def lifeline(text: str) -> str:
    """Returns a script as the first line of the shell's input."""
    return base64.b64encode(text.encode()).decode()


def exports(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def change_to(folder: str) -> list[str]:
    quoted = shlex.quote(folder)
    complaint = shlex.quote(f"{folder} is not there: share it over the network, or give --sync-dst-dir")
    return [f'cd {quoted} 2>/dev/null || {{ echo "$(hostname):" {complaint} >&2; exit 1; }}']


def own_address(addresses: Sequence[str], found: str) -> list[str]:
    """Returns lines that run `found` on a host with one of these addresses, as $address. Behind address translation
    (clouds' public addresses) it has none."""
    return [
        f"for address in {' '.join(dict.fromkeys(addresses))}; do",
        f'    case " $(hostname -I 2>/dev/null) " in *" $address "*) {found} ;; esac',
        "done",
    ]
