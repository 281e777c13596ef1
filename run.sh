#!/usr/bin/env bash
# Trains through mpirun over the hosts of a file:  bash run.sh [--restarts N] [HOSTFILE] [--flag value ...]
#
#   --restarts N        where the run fails (a host or a process dies, an exchange hangs), it is started again from the
#                       newest checkpoint, at most N times: at once, after RESTART_PAUSE_S (10) seconds where it got no
#                       further than the time before, and not after two such tries. This host must see the checkpoints
#   HOSTFILE            or HOSTS in the environment; hosts/localhost_2 without either. Lines "HOST slots=N", or
#                       "HOST" for one process there (horovodrun --hostfile needs slots=N in each line, and stumbles
#                       over comments and empty lines).
#   NETWORK_INTERFACE   where hosts have several networks, the one between them (ip addr), for example eth0
#
# The flags go to config.sh, which every process runs. Settings of Open MPI go through the environment, for example
# OMPI_MCA_plm_rsh_args="-p 2222" for another ssh port.
#
# kill -TERM or -USR1 to this script: the run finishes its step, writes a checkpoint and ends with status 75, "start me
# again", which is passed on and never restarted: somebody wants the machines. A second -TERM, more than a second later,
# ends it at once. A terminal that is closed counts as one -USR1, unless under nohup. Ctrl-C does the same, with status 130;
# the second ends at once.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
say() { echo "run.sh: $*" >&2; }

restarts=0
if [[ ${1:-} == --restarts || ${1:-} == --restarts=* ]]; then
    [[ $1 == *=* ]] || { set -- "$1=${2:-}" "${@:3}"; }
    restarts=${1#*=}
    [[ $restarts =~ ^[0-9]+$ ]] || { say "--restarts is '$restarts'; expected a number, 0 or more"; exit 1; }
    shift
fi
hosts=${HOSTS:-$here/hosts/localhost_2}
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    hosts=$1
    shift
fi
for word in "$@"; do # help needs no hosts, and mpirun does not stand a reader who leaves (| head)
    case $word in -h | --help | --help-all | --help_all) exec bash "$here/config.sh" "$@" ;; esac
done
[[ -f $hosts && -r $hosts ]] || { say "cannot read the host file $hosts: expected a file"; exit 1; }
# ssh takes a name with a dash before it for an option, mpirun one with a comma for two.
bad=$(LC_ALL=C awk '!/^[ \t]*(#|$)/ && $1 !~ /^[A-Za-z0-9_.][A-Za-z0-9_.-]*$/ { print NR; exit }' "$hosts")
[ -z "$bad" ] || { say "$hosts, line $bad: no name of a host; expected lines \"HOST slots=N\""; exit 1; }
# A host without slots is one process. (Of a file without them Open MPI puts as many on a host as it has cores.)
places=$(awk '{ slots = 1; for (i = 2; i <= NF; i++) if ($i ~ /^slots=[0-9]+$/ && length($i) < 12) slots = substr($i, 7) }
    !/^[ \t]*(#|$)/ { list = list "," $1 ":" slots; sum += slots } END { print sum + 0, substr(list, 2) }' "$hosts")
processes=${places%% *}
[ "$processes" -gt 0 ] || { say "no line \"HOST slots=N\" in $hosts"; exit 1; }

# mpirun starts remote processes with a bare environment: what matters is named. An unset variable would be a warning.
pass=()
for name in $(compgen -e); do
    case $name in
        PATH | LD_LIBRARY_PATH | PYTHON | RECIPE | DATASET | REC | MODELS_ROOT | CUDA_VISIBLE_DEVICES | MASTER_*) pass+=(-x "$name") ;;
        PARTIAL_FC_* | HOROVOD_* | NCCL_* | GLOO_* | OMP_* | MKL_* | TORCH_* | PYTORCH_* | MXNET_*) pass+=(-x "$name") ;;
    esac
done
interface=()
# On one host through shared memory alone: MPI's ranks would otherwise listen for other hosts on all addresses.
transports=^openib
case ${places#* } in *,*) ;; *) transports=self,vader ;; esac
if [ -n "${NETWORK_INTERFACE:-}" ]; then
    interface=(-mca btl_tcp_if_include "$NETWORK_INTERFACE" -mca oob_tcp_if_include "$NETWORK_INTERFACE")
fi

# Open MPI keeps a run's files in /tmp/ompi.HOST.USER, and every mpirun removes that folder where it finds it empty, also
# when another one has just made it and is about to use it: that one ends. So each run has a folder with a name of its
# own, on all hosts, unless somebody has said where such files go.
sessions=()
own_sessions=yes
[ -z "${TMPDIR:-}${OMPI_MCA_orte_tmpdir_base:-}${OMPI_MCA_orte_top_session_dir:-}" ] || own_sessions=
# Where a rank has failed mpirun ends the others: it asks, waits a second, twice, whatever they do, and kills. Here nothing
# waits for it where all are to be started again.
ending=()
[ "$restarts" = 0 ] || ending=(-mca odls_base_sigkill_timeout 0)

# ---- signals: mpirun passes SIGUSR1 on to every process, but kills them a second after SIGTERM or Ctrl-C. Where this
# script is killed itself, mpirun gets a SIGUSR1, too: nobody is left who could end it.
with_us=()
if command -v setpriv >/dev/null; then with_us=(setpriv --pdeathsig USR1); fi
job='' asked='' interrupted=''
stop() {
    local now=${EPOCHREALTIME//[!0-9]/} # microseconds
    # timeout(1) and schedulers send theirs to the script and to its process group: it gets two, which are one.
    if [ -n "$asked" ] && ((now - asked < 1000000)); then return; fi
    [ -z "$asked" ] && signal=USR1 || signal=$1 # a second one: whoever sends it does not want to wait
    asked=${asked:-$now}
    if [ -n "$job" ]; then kill -"$signal" "$job" 2>/dev/null || true; fi
}
interrupt() {
    interrupted=yes
    stop INT
}
trap 'stop TERM' TERM
trap 'stop USR1' USR1
trap '[ -n "$asked" ] || stop USR1' HUP # one closed terminal sends several; what nohup ignores stays ignored
trap interrupt INT

# Runs the job once; its status is in $status.
run() {
    # No binding: each process needs the cores of its threads, not one core. TCP (pml ob1) rather than whatever else the
    # library finds: NCCL carries what is large, and MPI's other transports differ between hosts.
    [ -z "$own_sessions" ] || sessions=(-mca orte_top_session_dir "/tmp/ompi.run.${SRANDOM:-$RANDOM$RANDOM}")
    set -m # a process group of its own: Ctrl-C in a terminal reaches us alone, and mpirun from us, once
    "${with_us[@]}" mpirun -np "$processes" --host "${places#* }" --allow-run-as-root --bind-to none --map-by slot \
        -mca pml ob1 -mca btl "$transports" "${interface[@]}" "${sessions[@]}" "${ending[@]}" "${pass[@]}" \
        bash "$here/config.sh" "$@" </dev/null &
    job=$!
    set +m
    if [ -n "$asked" ]; then kill -USR1 "$job"; fi
    while kill -0 "$job" 2>/dev/null; do wait "$job" || true; done # `wait` also returns for a signal
    status=0
    wait "$job" || status=$? # again: bash keeps it
    job=''
}

# Where the checkpoints are; without a flag that says so the trainer knows.
folder_of() {
    local folder='' root=${MODELS_ROOT:-} words=("$@") i name value
    for ((i = 0; i < ${#words[@]}; i++)); do
        name=${words[i]%%=*} value=${words[i]#*=}
        [[ ${words[i]} == *=* ]] || value=${words[i + 1]:-}
        case ${name//_/-} in
            --models-root | --save-dir) root=$value ;;
            --checkpoint-dir) folder=$value ;;
        esac
    done
    if [ -z "$folder$root" ]; then
        PARTIAL_FC_WHERE=1 bash "$here/config.sh" "$@"
    else
        echo "${folder:-$root/checkpoints}"
    fi
}
# The newest complete one that this host sees. What a run has set aside (step-N.damaged) is none.
newest() { [ -z "$checkpoints" ] || ls -d "$checkpoints"/step-*/COMPLETE 2>/dev/null | grep -E '/step-[0-9]+/COMPLETE$' | sort | tail -n 1 || true; }

# ---- the run, and again
flags=("$@")
checkpoints=''
[ "$restarts" = 0 ] || checkpoints=$(folder_of "$@")
without_progress=0
for ((try = 0; ; try++)); do
    before=$(newest)
    run "${flags[@]}"
    [ -z "$interrupted" ] || exit 130
    # 2: the command line was not understood.
    if [ "$restarts" = 0 ] || [[ $status =~ ^(0|2|75|130)$ ]] || [ -n "$asked" ]; then exit "$status"; fi
    after=$(newest)
    if [ "$after" = "$before" ]; then without_progress=$((without_progress + 1)); else without_progress=0; fi
    if [ "$without_progress" = 2 ]; then
        say "status $status, and no newer checkpoint than ${after:-none} in two tries: it would fail again, no restart"
        [ -n "$after" ] || say "(looked for in $checkpoints on $(hostname): this host must see what the ranks write)"
        exit "$status"
    fi
    if [ "$try" = "$restarts" ]; then
        say "status $status after $restarts restart(s), as many as --restarts allows"
        exit "$status"
    fi
    [ -z "$after" ] || flags=("$@" --resume auto) # also where the run began from another checkpoint, or from none
    # A host that is gone may come back; where there was progress nothing is waited for.
    pause=0
    [ "$after" != "$before" ] || pause=${RESTART_PAUSE_S:-10}
    say "status $status; restart $((try + 1)) of at most $restarts in $pause s, from ${after:-the beginning}"
    for ((i = 0; i < 5 * pause; i++)); do
        [ -z "$interrupted$asked" ] || break
        sleep 0.2
    done
    [ -z "$interrupted" ] || exit 130
    [ -z "$asked" ] || exit 75
done
