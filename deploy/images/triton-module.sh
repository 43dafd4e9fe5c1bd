#!/bin/sh
# Run in the build stage of a CUDA image: triton-module.sh ENVIRONMENT
#
# Triton compiles one C module at its first use. This compiles it now, and installs a program that Triton can call as its
# compiler ($CC) and that copies the module. The image itself then needs no compiler.
set -eu
environment=$1
python=$environment/bin/python
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')

apt-get update
apt-get install -y --no-install-recommends gcc libc6-dev
[ -e "$include/Python.h" ] || apt-get install -y --no-install-recommends python3-dev

backend=$("$python" -c 'import importlib.util as u; print(u.find_spec("triton").submodule_search_locations[0])')/backends/nvidia
kept=$environment/lib/triton-module
work=$(mktemp -d)
mkdir "$kept"
cp "$backend/driver.c" "$kept/driver.c"
# Link with an empty libcuda.so.1: images are built without the driver. At run time the node provides the real one.
gcc -shared -Wl,-soname,libcuda.so.1 -o "$work/libcuda.so.1" -x c /dev/null
gcc "$kept/driver.c" -O3 -shared -fPIC -Wno-psabi -Wl,--no-as-needed -L"$work" -l:libcuda.so.1 \
  -I"$backend/include" -I"$include" -o "$kept/module.so"

# Triton calls it as $CC: SOURCE ... -o OUT ...
cat >"$environment/bin/triton-module" <<EOF
#!/bin/sh
# Copies the compiled C module of Triton to OUT; compiles nothing.
set -eu
source=\$1
while [ "\$1" != -o ]; do shift; done
if ! cmp -s "\$source" "$kept/driver.c"; then
  echo "\$source: must be Triton's own driver.c; this image has no compiler for other modules" >&2
  exit 1
fi
cp "$kept/module.so" "\$2"
EOF
chmod 755 "$environment/bin/triton-module"
rm -rf "$work"
