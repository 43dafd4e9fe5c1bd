#!/bin/sh
# Run COMMAND as a container runtime would: with ROOT as a read-only root, a /dev and /proc of its own, a tmpfs at
# each VOLUME, as UID:GID, without capabilities, in WORKDIR. The environment is passed on. Call it in new mount and
# process namespaces; the network is the machine's.
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
