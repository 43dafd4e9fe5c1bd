#!/bin/sh
# Becomes what a container runtime would run, as little as that takes: ROOT as a read-only root, /dev and /proc of
# its own, memory under each of VOLUMES, and COMMAND as USER without a capability. The environment is handed on.
# To be called in new namespaces of mounts and processes: the network is the machine's.
#   contain.sh ROOT UID:GID WORKDIR "VOLUME VOLUME..." COMMAND...
set -eu
root=$1 user=$2 workdir=$3 volumes=$4
shift 4

mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
mount -t tmpfs -o mode=755,size=1m tmpfs dev
for device in null zero full random urandom; do
  touch "dev/$device"
  mount --bind "/dev/$device" "dev/$device"
done
ln -s /proc/self/fd dev/fd
mkdir dev/shm
mount -t tmpfs -o mode=1777 tmpfs dev/shm
for volume in $volumes; do
  mount -t tmpfs -o "mode=$(stat -c %a ".$volume"),uid=$(stat -c %u ".$volume"),gid=$(stat -c %g ".$volume")" \
    tmpfs ".$volume"
done
mount -o remount,bind,ro .
pivot_root . .
umount -l .
cd "$workdir"
exec setpriv --reuid "${user%:*}" --regid "${user#*:}" --clear-groups --no-new-privs \
  --bounding-set=-all --inh-caps=-all -- "$@"
