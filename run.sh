#!/usr/bin/env bash
# Trains through mpirun over the hosts of a file:  bash run.sh [HOSTFILE] [--flag value ...]
#
#   HOSTFILE            or HOSTS in the environment; hosts/localhost_2 without either. Lines "HOST slots=N", nothing else
#                       (horovodrun --hostfile, which takes them too, stumbles over comments and empty lines).
#   NETWORK_INTERFACE   where hosts have several networks, the one between them (ip addr), for example eth0
#
# The flags go to config.sh, which every process runs. Settings of Open MPI go through the environment, for example
# OMPI_MCA_plm_rsh_args="-p 2222" for another ssh port.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

hosts=${HOSTS:-$here/hosts/localhost_2}
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
    hosts=$1
    shift
fi
[ -r "$hosts" ] || { echo "run.sh: cannot read the host file $hosts" >&2; exit 1; }
processes=$(awk '{ slots = 1; for (i = 2; i <= NF; i++) if ($i ~ /^slots=[0-9]+$/) slots = substr($i, 7) }
    !/^[ \t]*(#|$)/ { sum += slots } END { print sum + 0 }' "$hosts")
[ "$processes" -gt 0 ] || { echo "run.sh: no line \"HOST slots=N\" in $hosts" >&2; exit 1; }

# mpirun starts remote processes with a bare environment: what matters is named. An unset variable would be a warning.
pass=()
for name in $(compgen -e); do
    case $name in
        PATH | LD_LIBRARY_PATH | PYTHON | RECIPE | DATASET | REC | MODELS_ROOT | CUDA_VISIBLE_DEVICES | MASTER_*) pass+=(-x "$name") ;;
        HOROVOD_* | NCCL_* | GLOO_* | OMP_* | MKL_* | TORCH_* | PYTORCH_* | MXNET_*) pass+=(-x "$name") ;;
    esac
done
interface=()
if [ -n "${NETWORK_INTERFACE:-}" ]; then
    interface=(-mca btl_tcp_if_include "$NETWORK_INTERFACE" -mca oob_tcp_if_include "$NETWORK_INTERFACE")
fi

# No binding: each process needs the cores of its threads, not one core. TCP (pml ob1) rather than whatever else the
# library finds: NCCL carries what is large, and MPI's other transports differ between hosts.
exec mpirun -np "$processes" -hostfile "$hosts" --allow-run-as-root -bind-to none -map-by slot \
    -mca pml ob1 -mca btl ^openib "${interface[@]}" "${pass[@]}" \
    bash "$here/config.sh" "$@"
