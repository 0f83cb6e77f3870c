#!/bin/bash
# Builds NCCL and the flow over NCCL M2N that bench/gpu.sh compares with:
#
#   bench/peers/build_m2n.sh NCCL M2N [FOLDER]
#
# NCCL: its source (2.30.5 or newer), which is built here without what M2N does not call, or a folder that
# has include/nccl.h and lib/libnccl.so.2 already. M2N: the wheel of PyPI's nccl-extensions, of which only
# the header and libnccl_m2n.so are used, or its folder nccl/m2n. FOLDER (build/peers) gets m2n and its two
# libraries. It needs nvcc; the architecture is that of this machine's first GPU, else 90 ($CUDA_ARCH).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 2 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
nccl=$(cd "$1" && pwd) m2n=$2 to=${3:-$here/../../build/peers}
PATH=$PATH:/usr/local/cuda/bin
cuda=$(cd "$(dirname "$(command -v nvcc)")/.." && pwd)
arch=${CUDA_ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d . || true)}
arch=${arch:-90}
mkdir -p "$to/lib"
to=$(cd "$to" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $m2n in
*.whl)
    python3 -m zipfile -e "$m2n" "$work"
    m2n=$work/nccl/m2n
    ;;
esac
if [ ! -e "$nccl/lib/libnccl.so.2" ]; then
    [ -e "$nccl/build/lib/libnccl.so.2" ] ||
        make -C "$nccl" -j "$(nproc)" src.build CUDA_HOME="$cuda" ONLY_FUNCS=SendRecv \
            NVCC_GENCODE="-gencode=arch=compute_$arch,code=sm_$arch" >"$to/nccl.log" 2>&1 ||
        { tail -n 20 "$to/nccl.log" >&2; exit 1; }
    nccl=$nccl/build
fi
library=$m2n/lib/cu$(nvcc --version | sed -n 's/.*release \([0-9]*\).*/\1/p')/libnccl_m2n.so
[ -e "$library" ] || library=$m2n/lib/libnccl_m2n.so
cp -L "$nccl/lib/libnccl.so.2" "$library" "$to/lib/"
nvcc -std=c++17 -O2 -arch="sm_$arch" -I"$nccl/include" -I"$m2n/include" "$here/m2n.cu" -o "$to/m2n" \
    -L"$to/lib" -Xlinker -l:libnccl.so.2,-l:libnccl_m2n.so,-rpath,'$ORIGIN/lib' \
    -Xlinker --unresolved-symbols=ignore-in-shared-libs
echo "$to/m2n"
