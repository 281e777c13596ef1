#!/usr/bin/env bash
# Build a wheel of Horovod 0.28.1 for the interpreter in $1 and leave it in folder $2.
#
# The release is from 2023 and asks for C++14; torch 2.13's headers need 20 and MXNet's stop at 17, so the
# two standards are set per sub-project. Nothing else in the sources changes.
# Set HOROVOD_GPU_OPERATIONS=NCCL (and have nvcc and NCCL there) for a GPU build; it is passed through.
set -euo pipefail
python=$1 wheels=$2
version=0.28.1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip download --quiet --no-deps --no-binary horovod --no-build-isolation -d "$work" "horovod==$version"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
source="$work/horovod-$version"
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' "$source/CMakeLists.txt"
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' "$source/horovod/torch/CMakeLists.txt"
grep -q 'CXX_STANDARD 17' "$source/CMakeLists.txt" && grep -q 'CXX_STANDARD 20' "$source/horovod/torch/CMakeLists.txt" ||
    { echo "build_horovod.sh: the CMake files are not those of $version; nothing was built" >&2; exit 1; }

mkdir -p "$wheels"
MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MXNET="${HOROVOD_WITH_MXNET:-1}" HOROVOD_WITHOUT_TENSORFLOW=1 \
    HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    "$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$wheels" "$source"
