#!/bin/sh
# venv.sh: makes build/venv with the packages that the Python tests compare with, once, and prints
# the path of its Python. They are the oracles: dray itself uses none of them. pip is used as this
# machine has it set up; on a machine without a GPU, PyTorch's index of CPU builds (see its
# installation page) in pip's settings saves some GB.
set -eu
cd "$(dirname "$0")/.."
wanted='torch==2.13.0 numpy safetensors transformers prometheus_client tensordict'
stamp=build/venv/.complete
if [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
    python=$(scripts/python.sh)
    rm -rf build/venv
    mkdir -p build
    {
        "$python" -m venv build/venv
        # shellcheck disable=SC2086 # a list
        build/venv/bin/python -m pip install -qq --retries 2 $wanted
        build/venv/bin/python -c 'import numpy, prometheus_client, safetensors, tensordict, torch, transformers'
    } >&2
    echo "$wanted" >$stamp
fi
echo "$PWD/build/venv/bin/python"
