#!/usr/bin/env bash
# What tests/faults does in a minute or two, for two hours: 10,000 changed files for every reader of files, then some 50 kills
# of a training, every signal to every process of every launcher, full
# disks, lost packets, and native code under sanitizers. Names of readers as arguments: only those get changed files; names
# of what is checked below (kills, signals ...): only that is done. INPUTS, ROUNDS, SIGNALS ("TERM KILL";
# all six) and SEED in the environment say how much, and which. A file that is read wrongly is printed by hypothesis.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
inputs=${INPUTS:-10000} rounds=${ROUNDS:-50} seed=${SEED:-1}

failed=() parts=(fuzzing)
# among NAME NAMES...
among() { printf '%s\n' "${@:2}" | grep -qxF -e "$1"; }
only=("$@")
check() {
    local name=$1
    shift
    parts+=("$name")
    if [ ${#only[@]} = 0 ] || among "$name" "${only[@]}"; then
        SECONDS=0
        "$@" || failed+=("$name: status $?")
        echo "$name: $SECONDS s"
    fi
}

mapfile -t all_readers < <(python -c "from tests.faults.foreign_files import READERS; print(*READERS, sep='\n')")
readers=()
for name in "${all_readers[@]}"; do
    if [ $# = 0 ] || among fuzzing "$@" || among "$name" "$@"; then readers+=("$name"); fi
done
# As many at a time as there are cores.
fuzz() {
    INPUTS=$inputs timeout 14400 python -m pytest "tests/faults/test_foreign_files.py::test_changed_files[$1]" \
        -o addopts= -q --import-mode=importlib -p no:cacheprovider --hypothesis-seed "$seed"
}
export -f fuzz
export inputs seed
if [ ${#readers[@]} -gt 0 ]; then
    SECONDS=0
    printf '%s\n' "${readers[@]}" | xargs -P "$(env -u OMP_NUM_THREADS nproc)" -I{} bash -c 'fuzz {}' ||
        failed+=("fuzzing: status $?")
    echo "fuzzing: $SECONDS s"
fi
# The C++ kernels, compiled with AddressSanitizer and UndefinedBehaviorSanitizer: their own tests; and the readers behind
# which other native code is (OpenCV, libjpeg, FFmpeg, torch, safetensors), which is not compiled so, but whose calls of
# malloc, memcpy and the like are watched.
native="image or video or rec or weights or apex or model or npy"
sanitized() ( # FOLDER: where the libraries go; a shell of its own, whose environment ends with it
    local preload
    preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
    export XDG_CACHE_HOME=$1 ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
    export PARTIAL_FC_KERNEL_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
    timeout 900 python -m partial_fc.head.native.build &&
        LD_PRELOAD=$preload timeout 1800 python -m pytest tests/unit/kernels/test_cpu_kernel.py tests/unit/kernels/test_cpu_rows.py &&
        LD_PRELOAD=$preload timeout 1800 python -m pytest tests/faults/test_foreign_files.py -k "changed_files and ($native)"
)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
check "kills" timeout 7200 python -m tests.faults.torture "$folder/kills" --mean-steps 20 --seed "$seed" -- \
    python train.py face --dataset synthetic --num-classes 2000 --num-images 256 --image-size 24 --batch-size 4 --backbone tiny \
    --embedding-size 32 --num-workers 1 --precision fp64 --max-steps $((20 * rounds)) --checkpoint-every 5 --gpus 2
# shellcheck disable=SC2086  # signals are words
check "signals" timeout 7200 python -m tests.faults.signals.kill_matrix "$folder/signals" ${SIGNALS:+--signals $SIGNALS}
check "disks" timeout 600 python -m pytest tests/faults/test_runs.py -k "disk or still"
check "enumeration" timeout 1800 python -m tests.faults.disk.enumeration "$folder/enumeration"
check "network" timeout 600 python -m pytest tests/faults/test_network.py
check "sanitizers" sanitized "$folder/kernels"
for name; do
    among "$name" "${parts[@]}" "${all_readers[@]}" || failed+=("$name is none of ${parts[*]}, and no reader")
done
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "nothing was found"
