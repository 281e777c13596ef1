#!/usr/bin/env bash
# For horovodrun --host-discovery-script: of the hosts in a file (NAME slots=N, like host_8) those that answer now.
#
#     HOST_FILE=hosts/host_16 horovodrun -np 16 --min-np 8 --max-np 16 --host-discovery-script hosts/discover.sh ...
#
# horovodrun runs this once a second; whoever edits the file adds or removes hosts while the job runs. A host must not be
# listed while it cannot be reached: horovodrun would start processes there, and the others would wait for them.
#
# Status 1, for which horovodrun leaves all hosts as they are (the first time it ends): a file that is missing, that names
# no host (it is just being written), or that has something else for a name. horovodrun makes shell commands of names.
set -euo pipefail
export LC_ALL=C # A-Z are those letters and no other
file=${HOST_FILE:?discover.sh: set HOST_FILE to a file with a line for each host, NAME slots=N}
refuse() { echo "discover.sh: $file: $*; expected lines \"NAME slots=N\"" >&2; exit 1; }
local_names=" localhost 127.0.0.1 $(hostname) $(hostname -I) "

answers() { # NAME: its sshd takes connections
    [[ $local_names == *" $1 "* ]] ||
        timeout 2 bash -c 'exec 3<>"/dev/tcp/$1/$2"' _ "$1" "${SSH_PORT:-22}" 2>/dev/null
}

[[ -f $file ]] || refuse "is no file" # a FIFO would never begin, a device never end
hosts=()
while read -r name rest || [[ -n $name ]]; do # also a last line without its end
    [[ -n $name && $name != \#* ]] || continue
    [[ $name =~ ^[A-Za-z0-9_.][A-Za-z0-9_.-]*$ ]] || refuse "$(printf '%q' "$name") is no name of a host"
    slots=1
    [[ $rest =~ slots=([0-9]{1,5})([^0-9]|$) ]] && slots=${BASH_REMATCH[1]}
    hosts+=("$name:$slots")
done <"$file"
[[ ${#hosts[@]} -gt 0 ]] || refuse "names no host"

for host in "${hosts[@]}"; do
    { answers "${host%:*}" && echo "$host"; } &
done
wait
