#!/usr/bin/env bash
# Everything this project needs on a machine, from nothing: `make setup`. Safe to repeat; a repeated run takes a second.
#
#   PYTHON=/path/to/python3.11   the interpreter, where the first one on the PATH is not wanted
#   TORCH_INDEX_URL=URL          pip index with the PyTorch build wanted (CPU only, or for one CUDA version). Without it
#                                pip takes what its own configuration offers; PIP_EXTRA_INDEX_URL etc. work as ever.
#   HOROVOD_GPU_OPERATIONS=NCCL  build Horovod with NCCL (nvcc and NCCL's headers must be on this machine)
#
# These choose what goes into a new .venv; to change them later, remove it first (`make clean`).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '[setup %4ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# --- 1. What the operating system provides ---------------------------------------------------------------------------
# A probe looks for what is used, not for the package: an Open MPI or a Python from elsewhere is as good.

have() { command -v "$1"; }
font() { test -e "/usr/share/fonts/$1"; }
# Exactly 3.11: MXNet 1.9.1 needs numpy 1.23, whose last wheels are for it. The base interpreter is meant: with .venv
# activated, python3 is the one that is about to be replaced.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        "$candidate" -c 'import sys; assert sys.version_info[:2] == (3, 11); print(sys._base_executable)' && return
    done 2>/dev/null
}
python_found() { test -n "$python"; }
python_venv() { "$python" -c 'import ensurepip, venv'; }
python_header() { "$python" -c 'import sysconfig as s; open(s.get_path("include") + "/Python.h")'; }

probes=(
    "python3.11           python_found"
    "python3.11-venv      python_venv"
    "python3.11-dev       python_header"
    "g++                  have g++"
    "make                 have make"
    "cmake                have cmake"
    "openmpi-bin          have mpirun"
    "libopenmpi-dev       have mpicxx"
    "openssh-client       have ssh"
    "openssh-server       test -x /usr/sbin/sshd"
    "iproute2             test -x /sbin/ip"
    "fonts-noto-cjk       font opentype/noto/NotoSerifCJK-Bold.ttc"
    "fonts-wqy-zenhei     font truetype/wqy/wqy-zenhei.ttc"
    "fonts-wqy-microhei   font truetype/wqy/wqy-microhei.ttc"
    "fonts-arphic-uming   font truetype/arphic/uming.ttc"
    "fonts-arphic-ukai    font truetype/arphic/ukai.ttc"
    "fonts-nanum          font truetype/nanum/NanumGothic.ttf"
    "fonts-unfonts-core   font truetype/unfonts-core/UnBatang.ttf"
)

# Sets `python` and `missing`.
probe() {
    local line
    python=$(find_python || true)
    [ -n "$python" ] || [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python 3.11"
    missing=()
    for line in "${probes[@]}"; do
        # shellcheck disable=SC2086  # package, command and argument are words
        set -- $line
        "${@:2}" >/dev/null 2>&1 || missing+=("$1")
    done
}

probe
if [ ${#missing[@]} -gt 0 ]; then
    install="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
    if [ "$(id -u)" != 0 ] || ! have apt-get >/dev/null; then
        die "these Debian packages are missing (or what they provide, where this is not Debian): ${missing[*]}
Nothing was changed. Install them as root, then run this again:
    $install"
    fi
    say "installing Debian packages: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        die "apt-get failed, see above; the command was: $install"
    probe
    [ ${#missing[@]} = 0 ] || die "installed, yet still not usable with ${python:-any Python}: ${missing[*]}"
fi

# --- 2. Is everything there already? ---------------------------------------------------------------------------------

base="$("$python" -V) $python $PWD"
kernels=partial_fc/head/kernels/native
stamp="$base $(cat constraints.txt setup.cfg pyproject.toml scripts/setup.sh scripts/build_horovod.sh $kernels/*.* | sha256sum)"
if [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ]; then
    say "already set up"
    exit
fi

# --- 3. Python packages ----------------------------------------------------------------------------------------------

# An environment made by another Python or in another folder cannot be repaired: its scripts name the old place.
clear=()
if [ -e .venv/stamp ] && [[ "$(cat .venv/stamp)" != "$base "* ]]; then clear=(--clear); fi
rm -f .venv/stamp
say "creating .venv with $python"
"$python" -m venv "${clear[@]}" .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check)
version() { sed -n "s/^$1==//p" constraints.txt; }

say "installing PyTorch $(version torch) (the largest download)"
"${pip[@]}" install --quiet -c constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch

say "installing MXNet, OpenCV and the rest"
"${pip[@]}" install --quiet -c constraints.txt setuptools wheel cffi cloudpickle packaging psutil pyyaml # for Horovod
"${pip[@]}" install --quiet -c constraints.txt --no-build-isolation -e '.[mxnet,glyphs,digits,export,dev]'

# --- 4. The head's CPU kernels, for every instruction set; seconds -----------------------------------------------------

say "compiling the head's CPU kernels"
.venv/bin/python partial_fc/head/kernels/native/build.py || die "see above"

# --- 5. Horovod: published as sources only, so built here once and kept ----------------------------------------------

torch=$(.venv/bin/python -c 'import torch; print(torch.__version__)') # with the build: 2.13.0+cpu is not 2.13.0+cu130
build="horovod-$(version horovod)-torch-$torch-mxnet-$(version mxnet)-py3.11-$(uname -m)${HOROVOD_GPU_OPERATIONS:+-$HOROVOD_GPU_OPERATIONS}-$(cksum <scripts/build_horovod.sh | cut -d' ' -f1)"
wheels="${XDG_CACHE_HOME:-$HOME/.cache}/partial-fc/wheels/$build"
if ! compgen -G "$wheels/*.whl" >/dev/null; then
    say "building Horovod $(version horovod) for PyTorch and MXNet: about 3 minutes on 2 cores; kept in $wheels"
    bash scripts/build_horovod.sh .venv/bin/python "$(version horovod)" "$wheels"
fi
"${pip[@]}" install --quiet --no-deps --force-reinstall "$wheels"/*.whl

say "checking Horovod"
check=$(.venv/bin/horovodrun --check-build 2>&1) || die "horovodrun --check-build failed:
$check"
for part in PyTorch MXNet MPI Gloo; do
    grep -qF "[X] $part" <<<"$check" || die "Horovod was built without $part, or cannot load it:
$check
The wheel is in $wheels; remove that folder to have it built again."
done

echo "$stamp" >.venv/stamp
say "ready: .venv ($(du -sh .venv | cut -f1))"
