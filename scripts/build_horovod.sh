#!/usr/bin/env bash
# Builds a wheel of Horovod, version $2, with the interpreter $1 and leaves it in folder $3 (107 s of processor time).
# For PyTorch, over MPI and Gloo.
#
# The sources are the release of 2023 with patches/horovod/*.patch, each of which says why at its head. HOROVOD_GPU_OPERATIONS
# and the like pass through.
set -euo pipefail
python=$1 version=$2 wheels=$3
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

grep -q "^horovod==$version " "$root/lock/horovod.txt" ||
    { echo "build_horovod.sh: lock/horovod.txt has no SHA-256 of horovod $version" >&2; exit 1; }
# No build isolation anywhere: the sources must see this environment's torch.
"$python" -m pip download --quiet --require-hashes --no-deps --no-binary horovod --no-build-isolation -d "$work" \
    -r "$root/lock/horovod.txt"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
source="$work/horovod-$version"

for patch in "$root"/patches/horovod/*.patch; do
    if [ "$(basename "$patch")" = cpu-only.patch ] && [ -n "$(env | sed -n 's/^HOROVOD_GPU[A-Z_]*=//p')" ]; then continue; fi
    patch --batch --no-backup-if-mismatch --directory="$source" --strip=1 --fuzz=0 --forward --silent <"$patch" ||
        { echo "build_horovod.sh: horovod $version: $patch does not apply; it needs a new look" >&2; exit 1; }
done

# Horovod and Gloo leave out headers that older standard libraries included by themselves (before GCC 13 and 14).
# CMake 4 refuses Gloo, which names a CMake older than 3.5, unless it is told to take it.
# Make's own MAKEFLAGS, where make called this, would set the number of jobs to one; so would nproc under OMP_NUM_THREADS.
env HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    CXXFLAGS="${CXXFLAGS:-} -include cstdint -include stdexcept -include string" \
    CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS="-j$(env -u OMP_NUM_THREADS nproc)" \
    "$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$work/wheels" "$source" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
mkdir -p "$wheels"
mv "$work"/wheels/*.whl "$wheels" # complete or not there at all: a stopped build leaves no half wheel in the cache
