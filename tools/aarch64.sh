#!/usr/bin/env bash
# Test the wheel for aarch64 in an emulator: tools/aarch64.sh [pytest's options]
#
# Takes Debian 12 on x86-64 with g++-aarch64-linux-gnu and qemu-user, .venv with the tools (make wheels), and the network.
# Debian's Python for aarch64, torch 2.6 (whose build for aarch64 needs no CUDA) and what tests need lie in
# .cache/aarch64 afterwards, 1 GB. Starting Python and torch takes minutes there.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -f dist/*aarch64.whl
.venv/bin/python tools/wheels.py --architecture aarch64

folder=$PWD/.cache/aarch64
root=$folder/root
if [ ! -e "$folder/ready" ]; then
    rm -rf "$folder"
    mkdir -p "$folder"/state/lists/partial "$folder"/cache/archives/partial "$root"
    touch "$folder/status"
    # apt with a state of its own, which changes nothing of this machine.
    apt=(apt-get -y -o "Dir::State=$folder/state" -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder/cache"
        -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "APT::Sandbox::User=$(id -un)" -o Debug::NoLocking=1)
    "${apt[@]}" update
    "${apt[@]}" install --no-install-recommends --download-only python3 libstdc++6
    for package in "$folder"/cache/archives/*.deb; do dpkg -x "$package" "$root"; done
    pip=(.venv/bin/pip install --no-compile --target "$folder/packages" --only-binary=:all: --python-version 3.11
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64)
    # Where pip takes this machine for the one that it installs for, torch would need CUDA.
    "${pip[@]}" --no-deps torch==2.6.0
    "${pip[@]}" filelock fsspec jinja2 networkx sympy typing_extensions \
        numpy pydantic PyYAML rich pytest pytest-timeout hypothesis ml_dtypes psutil
    touch "$folder/ready"
fi

# A folder without the checkout's package, whose library is one for x86-64.
rm -rf "$folder/run"
mkdir "$folder/run"
.venv/bin/python -m zipfile -e dist/*aarch64.whl "$folder/run"
cp -r tests examples benchmarks setup.cfg "$folder/run"
cd "$folder/run"
[ $# -gt 0 ] || set -- tests/unit/kernels/test_{golden,sums,combine}.py
PYTHONHOME=$root/usr PYTHONPATH=$folder/packages exec qemu-aarch64 -L "$root" "$root/usr/bin/python3.11" \
    -m pytest -p no:cacheprovider --timeout 900 "$@"
