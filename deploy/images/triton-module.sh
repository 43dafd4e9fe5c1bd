#!/bin/sh
# Of a CUDA image's build stage: compiles the one C module that Triton otherwise has a compiler make at its first
# use, and leaves what hands that module out, to be called as the compiler would be. So the image itself needs none.
#   triton-module.sh ENVIRONMENT
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
# There is no driver where images are built: something of its name to link with. The node brings the real one.
gcc -shared -Wl,-soname,libcuda.so.1 -o "$work/libcuda.so.1" -x c /dev/null
gcc "$kept/driver.c" -O3 -shared -fPIC -Wno-psabi -Wl,--no-as-needed -L"$work" -l:libcuda.so.1 \
  -I"$backend/include" -I"$include" -o "$kept/module.so"

# What Triton calls as $CC: SOURCE ... -o OUT ...
cat >"$environment/bin/triton-module" <<EOF
#!/bin/sh
# Hands out the C module of Triton that this image brings; it compiles nothing.
set -eu
source=\$1
while [ "\$1" != -o ]; do shift; done
if ! cmp -s "\$source" "$kept/driver.c"; then
  echo "\$source: this image has no compiler, and only the module that Triton itself needs" >&2
  exit 1
fi
cp "$kept/module.so" "\$2"
EOF
chmod 755 "$environment/bin/triton-module"
rm -rf "$work"
