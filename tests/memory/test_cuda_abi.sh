#!/bin/sh
# Compares src/memory/cuda_abi.h with the driver's own header, where a CUDA toolkit or pip's
# nvidia-cuda-runtime brings one: every constant, the size of every structure and the place of each
# of its members, and the type of every function. Otherwise 77.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
cuda=
for folder in "${CUDA_HOME:-/usr/local/cuda}/include" /usr/local/cuda*/include \
    "$(${DRAY_TEST_PYTHON:-python3} -c '
import importlib.util as u
s = u.find_spec("nvidia")
print(next(iter(s.submodule_search_locations)) if s else "")' 2>/dev/null)"/*/include; do
    if [ -e "$folder/cuda.h" ]; then
        cuda=$folder
        break
    fi
done
[ -n "$cuda" ] || { echo 'no cuda.h on this machine'; exit 77; }
command -v cc >/dev/null || { echo 'no compiler'; exit 77; }
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

# The same program twice: with our declarations and with the driver's.
cat >"$work/print.c" <<'END'
#include <stdio.h>
#include <stddef.h>
#include HEADER
#ifdef THEIRS /* the lists of ours, without its declarations */
#include LISTS
#endif
#define SIZE(type) printf(#type " %zu\n", sizeof(type));
#define AT(type, member)                                                                           \
    printf(#type "." #member " %zu %zu\n", offsetof(type, member), sizeof(((type *)0)->member));
int main(void)
{
#define XX(name, value) printf(#name " %ld\n", (long)name);
    DRAY__CUDA_RESULTS(XX)
    DRAY__CUDA_CONSTANTS(XX)
#undef XX
    SIZE(CUresult) SIZE(CUdevice) SIZE(CUdeviceptr) SIZE(CUmemGenericAllocationHandle)
    SIZE(CUuuid) SIZE(CUipcMemHandle) SIZE(CUipcEventHandle)
    SIZE(CUmemLocation) AT(CUmemLocation, type) AT(CUmemLocation, id)
    SIZE(CUmemAllocationProp) AT(CUmemAllocationProp, type)
    AT(CUmemAllocationProp, requestedHandleTypes) AT(CUmemAllocationProp, location)
    AT(CUmemAllocationProp, allocFlags.compressionType)
    AT(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable)
    AT(CUmemAllocationProp, allocFlags.usage)
    SIZE(CUmemAccessDesc) AT(CUmemAccessDesc, location) AT(CUmemAccessDesc, flags)
    SIZE(CUmemcpyAttributes) AT(CUmemcpyAttributes, srcAccessOrder)
    AT(CUmemcpyAttributes, srcLocHint) AT(CUmemcpyAttributes, dstLocHint)
    AT(CUmemcpyAttributes, flags)
    return 0;
}
END
awk '/#define DRAY__CUDA_(RESULTS|CONSTANTS|FUNCTIONS|OPTIONAL)/ { on = 1 }
     on { print } on && !/\\$/ { on = 0 }' "$here/../../src/memory/cuda_abi.h" >"$work/lists.h"
cc -DHEADER="\"$here/../../src/memory/cuda_abi.h\"" -o "$work/ours" "$work/print.c"
cc -DHEADER="\"$cuda/cuda.h\"" -DTHEIRS -DLISTS="\"$work/lists.h\"" -o "$work/theirs" "$work/print.c"
"$work/ours" >"$work/ours.txt"
"$work/theirs" >"$work/theirs.txt"
diff "$work/ours.txt" "$work/theirs.txt"

# Functions: declared with our parameters beside the driver's prototype of that symbol, which the
# compiler refuses where they differ. Our int stands for each enumeration of the driver.
cat >"$work/functions.c" <<'END'
#include <cuda.h>
#include LISTS
#define XX(name, symbol, parameters) typedef CUresult(*our_##name) parameters;
DRAY__CUDA_FUNCTIONS(XX)
#undef XX
#define XX(name, symbol, parameters) our_##name use_##name = (our_##name)name;
DRAY__CUDA_FUNCTIONS(XX)
END
cc -I"$cuda" -DLISTS="\"$work/lists.h\"" -Werror -Wcast-function-type -c -o "$work/functions.o" \
    "$work/functions.c"
# Which symbol the driver's header means by each name. (The second version of cuEventElapsedTime,
# of CUDA 12.8, has the same parameters; older drivers have the first alone.)
cat >"$work/symbols.c" <<'END'
#include <cuda.h>
#include LISTS
#define QUOTE_(x) #x
#define QUOTE(x) QUOTE_(x)
#include <stdio.h>
#include <string.h>
int main(void)
{
    int bad = 0;
#define XX(name, symbol, parameters)                                                               \
    if (strcmp(QUOTE(name), #symbol) && strcmp(#name, "cuEventElapsedTime")) {                                                            \
        printf(#name " is %s in cuda.h, and " #symbol " here\n", QUOTE(name));                     \
        bad = 1;                                                                                   \
    }
    DRAY__CUDA_FUNCTIONS(XX)
    return bad;
}
END
cc -I"$cuda" -DLISTS="\"$work/lists.h\"" -o "$work/symbols" "$work/symbols.c"
"$work/symbols"
echo "as in $cuda/cuda.h: $(wc -l <"$work/ours.txt") figures"
