#!/usr/bin/env bash
# What training needs on a machine, from nothing: `make setup`. Safe to repeat; a repeated run takes a second.
#
#   PYTHON=/path/to/python3      the interpreter, 3.11 or newer, where the first one on the PATH is not wanted
#   TORCH_INDEX_URL=URL          pip index with the PyTorch build wanted (CPU only, or for one CUDA version). Without it
#                                pip takes what its own configuration offers; PIP_EXTRA_INDEX_URL etc. work as ever.
#   HOROVOD_GPU_OPERATIONS=NCCL  build Horovod with NCCL (nvcc and NCCL's headers must be on this machine). Otherwise it is
#                                built without CUDA, whatever PyTorch's build is, and without MPI's or Gloo's GPU paths.
#   HOROVOD=0                    no Horovod, hence no compiler, no MPI, no ssh: torchrun and --gpus start the processes
#   ALL=1                        also what tests, exports, videos and every extra of setup.cfg need: `make setup-all`
#   MXNET=1                      MXNet, for `mnist --engine mxnet`; 0: not even with ALL=1. On x86-64 only
#
# Python packages are installed from lock/, each file by its SHA-256, wherever it comes from (docs/install.md).
# HOROVOD, ALL and MXNET are remembered; the others choose what goes into a new .venv: remove it first (`make clean`).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '[setup %4ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Runs one part of the set-up: says which, every 15 s that it still runs, and how long it took.
part() {
    local what=$1 start=$SECONDS
    shift
    say "$what"
    (while ! read -rt 15 -u "$never"; do say "    still: $what"; done) &
    ticker=$!
    "$@"
    stop_ticker
    say "    took $((SECONDS - start)) s"
}
stop_ticker() {
    if [ -n "$ticker" ]; then kill "$ticker" && wait "$ticker" || true; fi 2>/dev/null
    ticker=''
}
exec {never}<> <(:) # nobody writes to it, so reading it waits, without a process that would have to be stopped
ticker='' builder='' debian=''
stop_all() { # where a part fails or Ctrl-C stops it
    stop_ticker
    if [ -n "$builder" ]; then kill -- "-$builder" 2>/dev/null || true; fi
}
trap stop_all EXIT

# --- 1. What the operating system provides ---------------------------------------------------------------------------
# A probe looks for what is used, not for the package: an Open MPI or a Python from elsewhere is as good.

have() { command -v "$1"; }
font() { test -e "/usr/share/fonts/$1"; }
# The base interpreter is meant: with .venv activated, python3 is the one that is about to be replaced.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        "$candidate" -c 'import sys; assert sys.version_info >= (3, 11); print(sys._base_executable)' && return
    done 2>/dev/null
}
python_found() { test -n "$python"; }
python_venv() { "$python" -c 'import ensurepip, venv'; }
shared_library() { "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1"; }
python_header() { "$python" -c 'import sysconfig as s; open(s.get_path("include") + "/Python.h")'; }

remembered() { sed -n "s/^$1=//p" .venv/choices 2>/dev/null || true; }
HOROVOD=${HOROVOD:-$(remembered HOROVOD)} ALL=${ALL:-$(remembered ALL)} MXNET=${MXNET:-$(remembered MXNET)}
HOROVOD=${HOROVOD:-1} ALL=${ALL:-0}
choices="HOROVOD=$HOROVOD"$'\n'"ALL=$ALL"$'\n'"MXNET=$MXNET"
MXNET=${MXNET:-$([ "$(uname -m)" = x86_64 ] && echo "$ALL" || echo 0)}
for choice in "HOROVOD=$HOROVOD" "ALL=$ALL" "MXNET=$MXNET"; do
    [[ $choice == *=[01] ]] || die "$choice: expected 0 or 1"
done

probes=(
    "python3              python_found"
    "python3-venv         python_venv"
)
if [ "$MXNET" = 1 ]; then
    probes+=("libgomp1             shared_library libgomp.so.1")
fi
if [ "$HOROVOD" = 1 ]; then
    probes+=(
        "python3-dev          python_header"
        "g++                  have g++"
        "make                 have make"
        "patch                have patch"
        "cmake                have cmake"
        "openmpi-bin          have mpirun"
        "libopenmpi-dev       have mpicxx"
        "openssh-client       have ssh"
        "fonts-noto-cjk       font opentype/noto/NotoSerifCJK-Bold.ttc"
        "fonts-wqy-zenhei     font truetype/wqy/wqy-zenhei.ttc"
        "fonts-wqy-microhei   font truetype/wqy/wqy-microhei.ttc"
        "fonts-arphic-uming   font truetype/arphic/uming.ttc"
        "fonts-arphic-ukai    font truetype/arphic/ukai.ttc"
    )
fi
if [ "$HOROVOD$ALL" = 11 ]; then
    probes+=(
        "openssh-server       test -x /usr/sbin/sshd"
        "iproute2             test -x /sbin/ip"
        "rsync                have rsync"
        "redis-server         have redis-server"
        "fonts-nanum          font truetype/nanum/NanumGothic.ttf"
        "fonts-unfonts-core   font truetype/unfonts-core/UnBatang.ttf"
    )
fi

# Sets `python` and `missing`.
probe() {
    local line
    python=$(find_python || true)
    [ -n "$python" ] || [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a Python 3.11 or newer"
    missing=()
    for line in "${probes[@]}"; do
        # shellcheck disable=SC2086  # package, command and argument are words
        set -- $line
        "${@:2}" >/dev/null 2>&1 || missing+=("$1")
    done
}

install_debian() {
    local log
    log=$(apt-get update -qq 2>&1 && apt-get install -y -qq --no-install-recommends "$@" 2>&1) ||
        die "apt-get failed:
$log
The command was: apt-get update && apt-get install -y --no-install-recommends $*"
}
# The rest is installed while pip downloads PyTorch: `wait_for_debian`.
install_missing() {
    local package first=() later=()
    if [ "$(id -u)" != 0 ] || ! have apt-get >/dev/null; then
        die "these Debian packages are missing (or what they provide, where this is not Debian): ${missing[*]}
Nothing was changed. Install them as root, then run this again:
    apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
    fi
    export DEBIAN_FRONTEND=noninteractive
    for package in "${missing[@]}"; do
        case $package in python3 | python3-venv) first+=("$package") ;; *) later+=("$package") ;; esac
    done
    if [ ${#first[@]} -gt 0 ]; then
        part "Debian packages: ${first[*]}" install_debian "${first[@]}"
        python=$(find_python || true)
    fi
    if [ ${#later[@]} -gt 0 ]; then
        say "Debian packages, beside what follows: ${later[*]}"
        install_debian "${later[@]}" </dev/null &
        debian=$!
    fi
}
wait_for_debian() {
    wait "$debian" || exit 1
    debian=''
    probe
    [ ${#missing[@]} = 0 ] || die "installed, yet still not usable with ${python:-any Python}: ${missing[*]}"
}
probe
if [ ${#missing[@]} -gt 0 ]; then install_missing; fi
[ -n "$python" ] || die "no Python 3.11 or newer, and none could be installed"

# --- 2. Is everything there already? ---------------------------------------------------------------------------------

base="$("$python" -V) $python $PWD"
stamp="$base ${choices//$'\n'/ } $(cat constraints.txt lock/*.txt setup.cfg setup.py pyproject.toml scripts/setup.sh scripts/build_horovod.sh patches/horovod/* | sha256sum)"
if [ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ]; then
    if [ -n "$debian" ]; then part "waiting for the Debian packages" wait_for_debian; fi
    say "already set up"
    exit
fi

# --- 3. Python packages ----------------------------------------------------------------------------------------------

# An environment made by another Python or in another folder cannot be repaired: its scripts name the old place.
clear=()
if [ -e .venv/stamp ] && [[ "$(cat .venv/stamp)" != "$base "* ]]; then clear=(--clear); fi
rm -f .venv/stamp
"$python" -m venv "${clear[@]}" .venv
echo "$choices" >.venv/choices
pip=(.venv/bin/python -m pip --disable-pip-version-check)
version() { sed -n "s/^$1==//p" constraints.txt; }

# Installs all that these files of lock/ name, and nothing else: at that version, with one of those SHA-256s, built by its
# publisher. scripts/lock.py writes them. --no-compile: `compile_modules` does it with two processes.
locked() {
    local name files=()
    for name; do files+=(-r "lock/$name.txt"); done
    "${pip[@]}" install --quiet --no-compile --require-hashes --no-deps --only-binary :all: "${files[@]}"
}

# One version of PyTorch has many builds, each with files of its own: 2.13.0+cpu, 2.13.0+cu126. Sets `build` to the one that
# pip would take.
choose_build() {
    local listed
    listed=$("${pip[@]}" index versions torch ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} 2>&1) ||
        die "pip finds no PyTorch:
$listed"
    build=$(sed -n 's/^Available versions: //p' <<<"$listed" | tr -d ' ' | tr , '\n' | grep -m 1 -E "^$1(\+|\$)") ||
        die "pip finds no PyTorch $1, only:
$listed"
    [ -e "lock/torch-$build.txt" ] || die "no hashes of PyTorch $build in lock/, so it is not installed. If you trust where it
comes from, let them be written (uv is needed; once, and best kept under version control):
    python3 scripts/lock.py --torch $build --index-url ${TORCH_INDEX_URL:-URL}"
}

choose_build "$(version torch)"
install_torch() {
    locked base
    # Without its dependencies: those of its index may have other hashes.
    "${pip[@]}" install --quiet --no-compile --require-hashes --no-deps --only-binary :all: \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -r "lock/torch-$build.txt"
}
part "PyTorch $build, the largest download" install_torch
if [ -n "$debian" ]; then part "waiting for the Debian packages" wait_for_debian; fi
# It asks for a numpy of 2022 and runs with today's (recipes/mxnet/library.py).
if [ "$MXNET" = 1 ]; then part "MXNet $(version mxnet)" locked mxnet; fi

# --- 4. Horovod: published as sources only, so built here once and kept; meanwhile the rest ----------------------------

# Sets `wheels`, and starts the build where there is none yet: its process is `builder`, and a group of its own.
start_building_horovod() {
    local torch build
    # The build's name has all that decides it: 2.13.0+cpu is not 2.13.0+cu130.
    torch=$(.venv/bin/python -c 'import torch; print(torch.__version__)')
    build="horovod-$(version horovod)-torch-$torch"
    build+="-$(.venv/bin/python -c 'import sys; print(sys.implementation.cache_tag)')-$(uname -m)"
    build+="${HOROVOD_GPU_OPERATIONS:+-$HOROVOD_GPU_OPERATIONS}-$(cat scripts/build_horovod.sh patches/horovod/* | cksum | cut -d' ' -f1)"
    wheels="${XDG_CACHE_HOME:-${HOME:?set HOME or XDG_CACHE_HOME: wheels are kept there}/.cache}/partial-fc/wheels/$build"
    if compgen -G "$wheels/*.whl" >/dev/null; then return; fi
    say "building Horovod $(version horovod) for PyTorch, MPI and Gloo, beside what follows; kept in $wheels"
    set -m
    bash scripts/build_horovod.sh .venv/bin/python "$(version horovod)" "$wheels" </dev/null &
    builder=$!
    set +m
}
if [ "$HOROVOD" = 1 ]; then start_building_horovod; fi
beside=(nice -n 10) # the build takes longest: it has the cores first
pip=("${beside[@]}" "${pip[@]}")

install_packages() {
    local extras=train,glyphs
    locked trainer
    if [ "$ALL" = 1 ]; then
        locked more
        extras+=,digits,export,redis,video,dev
        # The torchvision of package registries is built for CUDA. Beside another PyTorch its operators do not load, and its
        # import fails where it describes two of them; so do the imports of timm and Lightning. Here it describes those that
        # it has.
        if ! .venv/bin/python -c 'import torchvision' 2>/dev/null; then
            sed -E -i 's/^@(torch\.library\.register_fake\("torchvision::.*"\))$/@(\1 if torchvision.extension._has_ops() else lambda f: f)/' \
                .venv/lib/python3*/site-packages/torchvision/_meta_registrations.py
        fi
    fi
    # Ourselves, from here: what is still missing is an error, not a download.
    env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null "${pip[@]}" install --quiet --no-index --no-build-isolation \
        -e ".[$extras]" || die "lock/ has not all that setup.cfg asks for: scripts/lock.py writes it anew"
}
part "OpenCV and the rest" install_packages

# Byte code, for an environment that forbids to write it at the first import, as many images do (PYTHONDONTWRITEBYTECODE):
# torch alone takes seconds longer there, in each process of each start. Some files are templates, and no Python.
compile_modules() {
    "${beside[@]}" .venv/bin/python -m compileall -q -j 2 partial_fc recipes
    (cd .venv/lib/python3*/site-packages && "${beside[@]}" ../../../bin/python -m compileall -q -j 2 -x '/tests?/' . >/dev/null || true)
}
part "compiling Python's byte code" compile_modules

# The head's CPU kernels, for the instruction sets of this processor; another one compiles its own at first use.
if have "${CXX:-g++}" >/dev/null; then
    kernels=$([ "$ALL" = 0 ] || echo runnable)
    part "compiling the head's CPU kernels" "${beside[@]}" .venv/bin/python partial_fc/head/native/build.py $kernels
else
    say "no g++: the head's CPU kernels are not compiled; the head takes the plain one, which is slower, and says so"
fi

install_horovod() {
    if [ -n "$builder" ]; then
        wait "$builder" || die "Horovod was not built, see above"
        builder=''
    fi
    "${pip[@]}" install --quiet --no-deps --force-reinstall "$wheels"/*.whl
}
check_horovod() {
    local check part
    check=$(.venv/bin/horovodrun --check 2>&1) || die "horovodrun --check failed:
$check"
    for part in PyTorch MPI Gloo; do
        grep -qF "[X] $part" <<<"$check" || die "Horovod was built without $part, or cannot load it:
$check
The wheel is in $wheels; remove that folder to have it built again."
    done
}
if [ "$HOROVOD" = 1 ]; then
    part "waiting for Horovod's build" install_horovod
    part "checking it: horovodrun --check" check_horovod
fi

echo "$stamp" >.venv/stamp
say "ready: .venv ($(du -sh .venv | cut -f1))"
