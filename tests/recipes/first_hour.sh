#!/usr/bin/env bash
# Types what README.md says under "From a folder of photos to embeddings", in its order, in an empty folder with an empty
# HOME, and what it says beside that: Ctrl-C and the same line again, another network, the Python lines.
#   bash tests/recipes/first_hour.sh              installs into an environment of its own first: pip, some minutes
#   bash tests/recipes/first_hour.sh VENV         with what is installed there
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${1:-}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir home
export HOME=$PWD/home
say() { printf '[first hour %4ds] %s\n' "$SECONDS" "$*"; }

if [ -z "$venv" ]; then
    say "pip install"
    python3 -m venv venv
    venv=$PWD/venv
    "$venv/bin/pip" install -q -c "$repository/constraints.txt" "$repository[export]" scikit-image
else
    venv=$(cd "$repository" && cd "$venv" && pwd)
fi
export PATH="$venv/bin:$PATH"
expect() { [ -s "$1" ] || { say "README.md promises $1, which is not there"; exit 1; }; }

# The indented lines of that section, and its Python.
section=$(awk '/^## /{on = /From a folder of photos/} on' "$repository/README.md")
mapfile -t commands < <(sed -n 's/^    \(partial-fc [^#]*[^# ]\) *\(#.*\)\?$/\1/p' <<<"$section")
[ ${#commands[@]} -ge 8 ] || { say "README.md has ${#commands[@]} commands there, expected 8 or more"; exit 1; }

python "$repository/tests/recipes/own_photos.py" own
mv own/photos own/unseen .
for command in "${commands[@]}"; do
    say "$command"
    read -ra words <<<"$command"
    if [ "${words[1]}" = train ]; then
        # Ctrl-C reaches the whole group of a terminal's job; here the command that the others listen to.
        python -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); os.execvp(sys.argv[1], sys.argv[1:])' \
            "${words[@]}" >interrupted.log 2>&1 &
        job=$!
        until grep -q "Global Step: 10 " interrupted.log; do
            kill -0 $job || { cat interrupted.log; exit 1; }
            sleep 0.1
        done
        kill -INT $job
        status=0
        wait $job || status=$?
        [ $status = 130 ] || { cat interrupted.log; say "Ctrl-C gave status $status, expected 130"; exit 1; }
        say "Ctrl-C: $(grep -o 'checkpoints/step-[0-9]*' interrupted.log | tail -1); the same line again"
        "${words[@]}" >again.log 2>&1 || { cat again.log; exit 1; }
        grep -q "Training is over" again.log
        ! grep -q "Global Step: 1 " again.log || { say "the second start began anew"; exit 1; }
        other=("${words[@]/tiny/mbf}")
        "${other[@]}" --max-steps 1 --val-targets >other.log 2>&1 || { cat other.log; exit 1; }
    else
        "${words[@]}" >out.log 2>&1 || { cat out.log; exit 1; }
    fi
done
run=runs/face-faces-tiny
for file in "$run/model.safetensors" "$run/loss.png" "$run/training.log" "$run/evaluation/evaluation.json" "$run/evaluation/roc.png" \
    "$run/search/neighbours.png" "$run/report.html" photos.npz faces.onnx runs/face-faces-mbf/model.safetensors; do
    expect "$file"
done
sed -n '/^```python$/,/^```$/{/^```/!p}' <<<"$section" >read_me.py
say "python: $(python read_me.py)"
python -c 'import json, sys
accuracy = json.load(open(sys.argv[1]))["evaluations"]["unseen/accuracy"]
assert accuracy > 0.7, accuracy' "$run/result.json"
say "all that README.md promises is there"
