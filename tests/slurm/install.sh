#!/bin/bash
# Debian packages of the test cluster (root; about 4 MB). Their daemons are not started.
set -euo pipefail
missing=
for name in slurmctld slurmd sbatch munged ip unshare nsenter setpriv; do
  command -v $name >/dev/null || missing="$missing $name"
done
[ -n "$missing" ] || exit 0
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  printf '#!/bin/sh\nexit 101\n' >$policy
  chmod 755 $policy
  trap 'rm -f $policy' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=120 update
apt-get -qq -o DPkg::Lock::Timeout=120 install -y --no-install-recommends slurm-wlm munge iproute2 util-linux
