#!/usr/bin/env bash
# All tests, by cost; `scripts/test.sh quick`: those for people at work; `scripts/test.sh long`: what enumerates and
# kills, which the first leaves out; `scripts/test.sh old`: units with numbers in them, with the instructions of a processor
# that has AVX2 and no more. Every stage runs, also after one that failed.
# The end lists what each took beside what it may cost on two idle cores, and names those that failed.
# More arguments go to pytest in every stage: `scripts/test.sh -k sampling`.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several processes share the cores
# Ranks that wait for a collective that one of them never calls: Horovod names it after 30 s and gives up after 60 s.
export HOROVOD_STALL_CHECK_TIME_SECONDS=30 HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=60
# Some containers forbid Python to keep what it compiled: each of some hundred processes then compiles all of partial_fc
# anew: 0.4 of the 1.8 s of processor time that it takes to start.
export PYTHONDONTWRITEBYTECODE=''
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # horovodrun --mpi as root
export OMPI_MCA_rmaps_base_oversubscribe=1                       # more ranks than cores
export OMPI_MCA_mpi_yield_when_idle=1 # a rank that waits gives its core to the others: 9 s instead of 21 on busy cores

mode=all
case "${1:-}" in quick | long | old) mode=$1 && shift ;; esac
table='' budget=0 failed=()
# stage NAME SECONDS COMMAND...: SECONDS is what it may cost. A test that needs more displaces another one, or is `slow`.
stage() {
    local name=$1 may=$2 start=$SECONDS result=passed note='' took
    shift 2
    echo "==== $name"
    "$@" || case $? in
        77) result=skipped note=' (no horovodrun here)' ;;
        *) result=FAILED && failed+=("$name") ;;
    esac
    took=$((SECONDS - start)) budget=$((budget + may))
    [ "$took" -le "$may" ] || note+=' (over)'
    echo "==== $name: $result in $took s"
    table+=$(printf '%5d s of %3d  %-7s  %s%s' "$took" "$may" "$result" "$name" "$note")$'\n'
}

# In every rank the same plain pytest. It stops at the first failure (-x): after one, the ranks would no longer call the
# same collectives. A test that hangs shows every thread's stack and ends its rank after two minutes; the launcher then
# ends the others.
ranks=(python -m pytest -x --tb=short --color=no -o faulthandler_timeout=120 -o faulthandler_exit_on_timeout=true "$@")
# A file that has no test of a mark is not imported, which is what the short stages would spend most on.
marked() { grep -rl --include="test_*.py" "mark\.$1" "${@:2}" | sort; }
transport=("${ranks[@]}" -m transport $(marked transport tests/parallel))
run() { timeout --kill-after=10 900 "$@"; }
horovod() { command -v horovodrun >/dev/null || return 77 && run horovodrun "$@"; }
gloo() { horovod -np "$1" -H "localhost:$1" --gloo "${@:2}"; }
mpi() { horovod -np "$1" -H "localhost:$1" --mpi "${@:2}"; }
torch() { run torchrun --standalone --nproc_per_node="$1" --no-python "${@:2}"; }
# One process for each core; the tests of a file stay together, with what they share. tests/conftest.py has the order.
# Those that often wait: two processes more.
two=(-n 2 --dist loadfile --no-loadscope-reorder) four=(-n 4 --dist loadfile --no-loadscope-reorder)
unit=(tests/house tests/world tests/unit tests/bench -n 3 --dist loadfile --no-loadscope-reorder)

if [ "$mode" = quick ]; then
    stage "unit" 100 python -m pytest "${unit[@]}" -m "not slow and not mxnet and not long" "$@"
    stage "transport, torchrun, 2 ranks" 10 torch 2 "${transport[@]}"
    stage "recipe face, one rank and two" 15 python -m pytest tests/recipes/face/test_face.py -k two_processes_give_the_curve_of_one "$@"
elif [ "$mode" = long ]; then
    stage "every failing operation, who listens, launchers killed, the wheel" 390 python -m pytest -m "long and not mxnet" $(marked long tests/{bench,house,recipes,faults,cluster,world,unit/{checkpoint,head,models,optim,train,verbs}}) "${four[@]}" -rs "$@"
    stage "MXNet: what takes long" 60 python -m pytest -m "mxnet and long" $(marked mxnet tests/recipes) "${two[@]}" "$@"
    stage "parallel, horovodrun Gloo, 2 ranks" 65 gloo 2 "${ranks[@]}" tests/parallel
    stage "transport, horovodrun Gloo, 3 ranks" 12 gloo 3 "${transport[@]}"
    stage "transport, horovodrun MPI, 2 ranks" 9 mpi 2 "${transport[@]}"
    # The GPU's kernel, sharded, in Triton's interpreter. (One process: 40 s of tests/unit/kernels/test_triton.py, in test-old.)
    stage "Triton, horovodrun MPI, 3 ranks" 15 mpi 3 env TRITON_INTERPRET=1 "${ranks[@]}" tests/parallel/head/test_{head_kinds,topk}.py -k "sharded_equals_dense or nearest_classes and 0.2"
    # With PyTorch in uv's cache; else it downloads it twice.
    stage "the wheel in empty environments, Python 3.11 and 3.13" 115 python scripts/test_wheel.py
elif [ "$mode" = old ]; then
    # PyTorch, oneDNN, OpenBLAS and numpy each have a setting of their own; the head's kernel takes what PyTorch takes.
    export ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Zen
    export NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR"
    numeric=(tests/unit/head/{test_{head,head_callers,reference,step_operations},selection/test_quota,rows/test_row_{optimizers,table}}.py)
    numeric+=(tests/unit/kernels/test_{cpu_kernel,cpu_rows,triton}.py tests/unit/{optim/test_muon,train/test_precision,verbs/test_export}.py)
    # A processor without AVX512 has done so in `make test` already, but for what takes long.
    grep -qw avx512f /proc/cpuinfo || { numeric=(tests/unit/kernels/test_triton.py -m long) two=(-n 2); }
    stage "numbers, with AVX2 instructions" 90 python -m pytest -m "not mxnet" "${numeric[@]}" "${two[@]}" "$@"
else
    stage "unit and world" 180 python -m pytest "${unit[@]}" -m "not mxnet and not long" "$@"
    # In a process of their own: a crash under MXNet's handler for it is silent, and so were the tests after it.
    stage "MXNet: oracle and stores" 58 python -m pytest -m "mxnet and not long" $(marked mxnet tests/{unit,recipes}) "${two[@]}" "$@"
    # The mathematics does not depend on the transport: all of it over MPI on three ranks, by which the numbers of classes
    # do not divide; the core of the head's on two, too. Elsewhere only what speaks to the transport (more launchers: test-long).
    stage "the head and transport, horovodrun Gloo, 2 ranks" 20 gloo 2 "${ranks[@]}" tests/parallel/head/test_head{,_kinds}.py $(marked transport tests/parallel)
    stage "parallel, horovodrun MPI, 3 ranks" 50 mpi 3 "${ranks[@]}" -m "not long" tests/parallel
    stage "transport, torchrun, 2 ranks" 10 torch 2 "${transport[@]}"
    stage "transport, one process" 7 "${transport[@]}"
    # Faults are of processes, disks and cables. -rs: why, where some are skipped.
    stage "recipes, faults and two hosts" 275 python -m pytest tests/{recipes,faults,cluster} "${four[@]}" -m "not mxnet and not long" -rs "$@"
fi

printf '\n%s%5d s of %3d  in all\n' "$table" "$SECONDS" "$budget"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
