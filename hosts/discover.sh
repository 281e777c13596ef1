#!/usr/bin/env bash
# For horovodrun --host-discovery-script: of the hosts in a file (NAME slots=N, like host_8) those that answer now.
#
#     HOST_FILE=hosts/host_16 horovodrun -np 16 --min-np 8 --max-np 16 --host-discovery-script hosts/discover.sh ...
#
# horovodrun runs this once a second; whoever edits the file adds or removes hosts while the job runs. A host must not be
# listed while it cannot be reached: horovodrun would start processes there, and the others would wait for them.
set -euo pipefail
file=${HOST_FILE:?discover.sh: set HOST_FILE to a file with a line for each host, NAME slots=N}
own=" localhost 127.0.0.1 $(hostname) $(hostname -I) "

answers() { # NAME: its sshd takes connections
    [[ $own == *" $1 "* ]] || timeout 2 bash -c "exec 3<>/dev/tcp/$1/${SSH_PORT:-22}" 2>/dev/null
}

while read -r name rest || [[ -n $name ]]; do # also a last line without its end
    [[ -n $name && $name != \#* ]] || continue
    slots=1
    [[ $rest =~ slots=([0-9]+) ]] && slots=${BASH_REMATCH[1]}
    { answers "$name" && echo "$name:$slots"; } &
done <"$file"
wait
