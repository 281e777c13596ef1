#!/usr/bin/env bash
# Builds a wheel of Horovod, version $2, with the interpreter $1 and leaves it in folder $3 (about 3 minutes on 2 cores).
# MXNet among the other arguments: for it, too; always for PyTorch, over MPI and Gloo.
#
# The release is from 2023 and asks for C++14; torch 2.13's headers need 20 and MXNet's stop at 17, so the two standards
# are set per sub-project. It is built without debug information, Gloo leaves the size of send buffers to the kernel, and
# horovodrun waits two seconds, not minutes, for a host that does not answer, see below. Nothing else in the sources
# changes. HOROVOD_GPU_OPERATIONS and the like pass through.
set -euo pipefail
python=$1 version=$2 wheels=$3
if [[ " ${*:4} " == *" MXNet "* ]]; then mxnet=WITH; else mxnet=WITHOUT; fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# No build isolation anywhere: the sources must see this environment's torch and mxnet.
"$python" -m pip download --quiet --no-deps --no-binary horovod --no-build-isolation -d "$work" "horovod==$version"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
source="$work/horovod-$version"

# expect FILE TEXT: whatever is patched has to be there, before and after.
expect() {
    grep -qF "$2" "$source/$1" ||
        { echo "build_horovod.sh: horovod $version: $1 has no '$2'; its patch needs a new look" >&2; exit 1; }
}

old='set(CMAKE_CXX_STANDARD 14)'
for file in CMakeLists.txt horovod/torch/CMakeLists.txt; do expect "$file" "$old"; done
sed -i "s/$old/set(CMAKE_CXX_STANDARD 17)/" "$source/CMakeLists.txt"
sed -i "s/$old/set(CMAKE_CXX_STANDARD 20)/" "$source/horovod/torch/CMakeLists.txt"

# CUDA only where it is asked for: CMake turns it on by itself where PyTorch's build has it and there is an nvcc, and then
# fails unless the whole toolkit is there; it fails even where it only finds part of one.
expect CMakeLists.txt '    find_package(CUDAToolkit)'
expect cmake/Modules/FindPytorch.cmake '(torch.version.cuda is not None)'
if [ -z "$(env | sed -n 's/^HOROVOD_GPU[A-Z_]*=//p')" ]; then
    sed -i '/^    find_package(CUDAToolkit)$/d' "$source/CMakeLists.txt"
    sed -i 's/(torch.version.cuda is not None)/False/' "$source/cmake/Modules/FindPytorch.cmake"
fi

# MXNet 1.9.1 imports with today's numpy by way of partial_fc.mxnet only, in the build (with PYTHONPATH, below) and later.
expect cmake/Modules/FindMxnet.cmake 'import mxnet'
sed -i 's/import mxnet/import partial_fc.mxnet; &/' "$source/cmake/Modules/FindMxnet.cmake"
expect horovod/mxnet/__init__.py 'from horovod.common.util import check_extension'
sed -i 's/^from horovod.common.util import check_ext/import partial_fc.mxnet\n&/' "$source/horovod/mxnet/__init__.py"
expect horovod/mxnet/__init__.py 'import partial_fc.mxnet'

# An assignment to a constant, in a function that nobody calls: GCC 14 reports it all the same.
flatbuffers=third_party/flatbuffers/include/flatbuffers/stl_emulation.h
old='const size_type count_;'
expect $flatbuffers "$old"
sed -i "s/$old/${old#const }/" "$source/$flatbuffers"

# Debug information would be 110 of 116 MB installed, and a quarter of the time to build them.
old='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO'
expect CMakeLists.txt "$old"
sed -i "s/$old/${old/-O2/-O2 -g}/" "$source/CMakeLists.txt"

# Gloo fixes each socket's send buffer at the size of its largest message so far, which turns the kernel's own sizing off.
# A loopback packet of 64 kB then fills it, the next waits for an acknowledgement, and that is delayed by 40 ms: gradients
# of 1 MB took 200 ms between two processes of one host (docs/log.md, 2026-11-20). Without a limit nothing is fixed.
pair=third_party/gloo/gloo/transport/tcp/pair.cc
old='kMaxSendBufferSize = 32 * 1024 * 1024'
expect $pair "$old"
sed -i "s/${old//\*/\\*}/kMaxSendBufferSize = 0/" "$source/$pair"
expect $pair 'kMaxSendBufferSize = 0'

# horovodrun's elastic driver tells rank 0 of hosts that come and go, and forms no new world meanwhile. Its connect had no
# limit: with that host's cable cut, the others stood still for 82 s (docs/log.md, 2026-11-22).
network=horovod/runner/common/util/network.py
sed -i '/def _send_one/,/return resp/ s/^\( *\)sock\.connect(addr)$/\1sock.settimeout(2)\n&\n\1sock.settimeout(None)/' "$source/$network"
expect $network 'sock.settimeout(2)'

# Horovod and Gloo leave out headers that older standard libraries included by themselves (before GCC 13 and 14).
# Make's own MAKEFLAGS, where make called this, would set the number of jobs to one; so would nproc under OMP_NUM_THREADS.
env HOROVOD_WITH_PYTORCH=1 HOROVOD_${mxnet}_MXNET=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    PYTHONPATH="$root" CXXFLAGS="${CXXFLAGS:-} -include cstdint -include stdexcept -include string" \
    MAKEFLAGS="-j$(env -u OMP_NUM_THREADS nproc)" \
    "$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$work/wheels" "$source" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
mkdir -p "$wheels"
mv "$work"/wheels/*.whl "$wheels" # complete or not there at all: a stopped build leaves no half wheel in the cache
