#!/bin/bash
# PID 1 of one machine of the test cluster (see cluster.py): machine.sh NAME FOLDER. Ending it ends all on it.
set -u
name=$1 folder=$2
hostname "$name"
mount --make-rprivate /
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/resolv.conf" /etc/resolv.conf
mount -t tmpfs -o mode=1777,size=4g tmpfs /dev/shm
mount -t tmpfs -o mode=1777 tmpfs "$folder/disk"    # this machine's own disk
mount -t sysfs -o ro sysfs /sys 2>/dev/null || true # /sys/class/net of this network namespace
ip link set lo up
until [ -e "$folder/network.up" ]; do sleep 0.02; done
ulimit -c 0
export SLURM_CONF=$folder/slurm.conf
if [ "$name" = login ]; then
  # one munged serves all machines, over its unix socket
  munged -F -S "$folder/munge.sock" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
    --log-file="$folder/log/munged" --seed-file="$folder/munge.seed" &
  until munge -S "$folder/munge.sock" -n >/dev/null 2>&1; do kill -0 $! || exit; sleep 0.02; done
  touch "$folder/munge.up"
  slurmctld -D -f "$SLURM_CONF" &
else
  until [ -e "$folder/munge.up" ]; do sleep 0.02; done
  slurmd -D -f "$SLURM_CONF" -N "$name" &
fi
daemon=$!
while kill -0 "$daemon" 2>/dev/null; do wait "$daemon"; done  # bash as PID 1 reaps orphans meanwhile
echo "$name: its daemon has ended"
