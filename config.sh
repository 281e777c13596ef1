#!/usr/bin/env bash
# What each process runs:  horovodrun -np 2 -H localhost:2 bash config.sh [--flag value ...]
# Machine facts first, then what to train; the flags given here are defaults, a later flag wins. Works from any folder
# and on every host that has this checkout in the same place, set up by `make setup`.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$here/.venv/bin/python}
[ -x "$python" ] || { echo "config.sh on $(hostname): no $python; run 'make setup' in $here there" >&2; exit 1; }

# --- machine ---------------------------------------------------------------------------------------------------------

# The processes of a host share its cores. (nproc would otherwise answer with OMP_NUM_THREADS.) A single process takes all
# of them by itself, and those that --gpus starts divide them.
cores=$(env -u OMP_NUM_THREADS nproc)
local_size=${TORCHELASTIC_RUN_ID:+${LOCAL_WORLD_SIZE:-1}} # mpirun may have started torchrun
local_size=${local_size:-${HOROVOD_LOCAL_SIZE:-${OMPI_COMM_WORLD_LOCAL_SIZE:-${LOCAL_WORLD_SIZE:-${LOCAL_SIZE:-1}}}}}
if [ "$local_size" -gt 1 ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > local_size ? cores / local_size : 1))}
    export MXNET_CPU_WORKER_NTHREADS=${MXNET_CPU_WORKER_NTHREADS:-$OMP_NUM_THREADS}
fi

# What some ranks have and others still lack is asked for again every HOROVOD_CYCLE_TIME milliseconds. (The Horovod that
# `make setup` builds asks at once where a tensor is new, and not at all where there is none; a released one asks all the
# time: 1 ms costs it a tenth of a core per rank, and 3 ms a collective.)
export HOROVOD_CYCLE_TIME=${HOROVOD_CYCLE_TIME:-1}
# Backbone gradients that are ready at the same time travel together, up to this many bytes.
export HOROVOD_FUSION_THRESHOLD=${HOROVOD_FUSION_THRESHOLD:-67108864}
# HOROVOD_GPU_OPERATIONS (once HOROVOD_GPU_ALLREDUCE, _ALLGATHER, _BROADCAST) is a choice of the build, see
# scripts/setup.sh; set here it would have no effect. CUDA_VISIBLE_DEVICES is left alone: a process takes the device of
# its local rank among those visible.

# --- recipe ----------------------------------------------------------------------------------------------------------

# Without MODELS_ROOT the run is written to a folder of its own below runs/, in the folder where this is started.
recipe=${RECIPE:-face}
# The demo's characters and their preset, only where nobody says what to train on: photographs would be trained as if
# they were characters.
if [ "$recipe" = face ] && [ -z "${DATASET:-}${REC:-}" ] && [[ " $* " != *" --"@(rec|dataset|config)[=\ ]* ]]; then
    DATASET=glyphs REC=$here/demo/glyphs
fi
exec "$python" "$here/train.py" "$recipe" \
    ${DATASET:+--dataset "$DATASET"} \
    ${REC:+--rec "$REC"} \
    ${MODELS_ROOT:+--models-root "$MODELS_ROOT"} \
    "$@"
