#!/usr/bin/env bash
# Runs a command beside a batch queue on this host: batch_queue.sh sge|slurm COMMAND...
# Grid Engine or SLURM as Debian has them (gridengine-master, -exec and -client; slurm-wlm), with daemons, files, processes
# and a network of their own: nothing is left. Needs root. The host is called grid, 10.88.0.1; of SLURM it is two nodes.
set -euo pipefail
if [ -z "${BATCH_QUEUE_INSIDE:-}" ]; then
    exec env BATCH_QUEUE_INSIDE=1 unshare --mount --uts --net --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi
queue=$1
shift
hostname grid
mount -t tmpfs tmpfs /mnt
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 10.88.0.1/24 dev eth0
ip link set eth0 up
ip link set eth1 up
printf '127.0.0.1 localhost\n10.88.0.1 grid\n' >/mnt/hosts
mount --bind /mnt/hosts /etc/hosts

until_it_says() { # WORDS COMMAND...: at most 20 s
    local words=$1
    shift
    for _ in {1..100}; do
        if "$@" 2>&1 | grep -q "$words"; then return; fi
        sleep 0.2
    done
    echo "batch_queue.sh: '$*' does not say '$words'" >&2
    exit 1
}

sge() {
    local root=/var/lib/gridengine spool=/var/spool/gridengine
    export SGE_ROOT=$root SGE_CELL=default SGE_QMASTER_PORT=6444 SGE_EXECD_PORT=6445
    as_manager() { setpriv --reuid sgeadmin --regid sgeadmin --clear-groups "$@"; }
    mkdir /mnt/common
    cp /usr/share/gridengine/default-bootstrap /mnt/common/bootstrap
    echo grid >/mnt/common/act_qmaster
    mount -t tmpfs tmpfs "$root"
    ln -s /usr/share/gridengine/util "$root/util"
    mkdir -p "$root/default" "$root/bin"
    ln -s /usr/lib/gridengine "$root/bin/$(/usr/share/gridengine/util/arch)"
    mv /mnt/common "$root/default"
    mount -t tmpfs tmpfs "$spool"
    mkdir -p "$spool"/{qmaster/job_scripts,spooldb,execd}
    chown -R sgeadmin:sgeadmin "$root/default" "$spool"
    as_manager /usr/share/gridengine/scripts/init_cluster "$root" default "$spool/spooldb" sgeadmin >/dev/null
    sge_qmaster
    until_it_says schedule_interval qconf -ssconf
    as_manager qconf -as grid
    qconf -sconf | sed 's/^min_\([ug]id\).*/min_\1 0/' >/mnt/global # root may submit
    qconf -ssconf | sed 's/^schedule_interval.*/schedule_interval 0:0:1/' >/mnt/scheduler
    qconf -sq | sed 's/^qname .*/qname all.q/; s/^hostlist .*/hostlist grid/; s/^slots .*/slots 8/
        s/^pe_list .*/pe_list NONE/; s/^load_thresholds .*/load_thresholds NONE/' >/mnt/queue
    qconf -Mconf /mnt/global
    qconf -Msconf /mnt/scheduler
    qconf -Aq /mnt/queue
    sge_execd
    until_it_says 'all.q@grid.* lx-[^ ]* *$' qstat -f
}

slurm() {
    mkdir -p /mnt/state /run/munge
    mount -t tmpfs tmpfs /run/munge
    chown munge /run/munge
    chmod 755 /mnt /run/munge
    setpriv --reuid munge --regid munge --clear-groups munged
    export SLURM_CONF=/mnt/slurm.conf
    cat >"$SLURM_CONF" <<'X'
ClusterName=grid
SlurmctldHost=grid
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
StateSaveLocation=/mnt/state
SlurmdSpoolDir=/mnt/spool-%n
SlurmctldPidFile=/mnt/slurmctld.pid
SlurmdPidFile=/mnt/slurmd-%n.pid
SlurmctldLogFile=/mnt/slurmctld.log
SlurmdLogFile=/mnt/slurmd-%n.log
NodeName=n[1-2] NodeHostname=grid Port=[7001-7002] CPUs=4
PartitionName=all Nodes=ALL Default=YES
X
    printf '10.88.0.1 n1 n2\n' >>/etc/hosts
    slurmctld
    mkdir -p /mnt/spool-n1 /mnt/spool-n2
    slurmd -N n1
    slurmd -N n2
    until_it_says 'idle 2' sinfo -h -o '%T %D'
}

"$queue" >&2
"$@"
