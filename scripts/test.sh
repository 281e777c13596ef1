#!/usr/bin/env bash
# All tests, by cost. Every stage runs, also after one that failed; the end names those that did.
# Arguments go to pytest in every stage: `scripts/test.sh -k sampling`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several processes share the cores
# Ranks that wait for a collective that one of them never calls: Horovod names it after 30 s and gives up after 60 s.
export HOROVOD_STALL_CHECK_TIME_SECONDS=30 HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=60
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # horovodrun --mpi as root
export OMPI_MCA_rmaps_base_oversubscribe=1                       # more ranks than cores
export OMPI_MCA_mpi_yield_when_idle=1 # a rank that waits gives its core to the others: 9 s instead of 21 on busy cores

failed=()
stage() {
    local name=$1 start=$SECONDS
    shift
    echo "==== $name"
    if "$@"; then
        echo "==== $name: passed in $((SECONDS - start)) s"
    else
        echo "==== $name: FAILED after $((SECONDS - start)) s"
        failed+=("$name")
    fi
}

# In every rank the same plain pytest. It stops at the first failure (-x): after one, the ranks would no longer call the
# same collectives. A test that hangs shows every thread's stack and ends its rank after two minutes; the launcher then
# ends the others.
parallel=(-m pytest tests/parallel -x --tb=short --color=no -o faulthandler_timeout=120 -o faulthandler_exit_on_timeout=true "$@")
run() { timeout --kill-after=10 900 "$@"; }

# One process for each core; the tests of a file stay together, with what they share.
stage "unit" python -m pytest tests/unit -n 2 --dist loadfile "$@"
stage "parallel, horovodrun Gloo, 2 ranks" run horovodrun -np 2 -H localhost:2 --gloo python "${parallel[@]}"
# Three ranks on two cores wait for each other four times as long over Gloo as over MPI: here only what speaks to it.
stage "parallel, horovodrun Gloo, 3 ranks" run horovodrun -np 3 -H localhost:3 --gloo python "${parallel[@]}" \
    --deselect tests/parallel/test_head.py --deselect tests/parallel/test_head_kinds.py
stage "parallel, horovodrun MPI, 2 ranks" run horovodrun -np 2 -H localhost:2 --mpi python "${parallel[@]}"
stage "parallel, horovodrun MPI, 3 ranks" run horovodrun -np 3 -H localhost:3 --mpi python "${parallel[@]}"
stage "parallel, torchrun, 2 ranks" run torchrun --standalone --nproc_per_node=2 "${parallel[@]}"
stage "parallel, one process" run python "${parallel[@]}"
# The GPU's kernel, sharded, in Triton's interpreter.
triton=(env TRITON_INTERPRET=1 python "${parallel[@]}" -k sharded_equals_dense)
stage "Triton, one process" run "${triton[@]}"
stage "Triton, horovodrun Gloo, 2 ranks" run horovodrun -np 2 -H localhost:2 --gloo "${triton[@]}"
stage "Triton, horovodrun Gloo, 3 ranks" run horovodrun -np 3 -H localhost:3 --gloo "${triton[@]}"
stage "recipes" python -m pytest tests/recipes -n 2 --dist loadfile "$@"
stage "faults" python -m pytest tests/faults -rs "$@"
stage "cluster, two hosts" python -m pytest tests/cluster -rs "$@" # -rs: why, where it is skipped

if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all stages passed in $((SECONDS / 60)) min $((SECONDS % 60)) s"
