#!/bin/bash
# All suites for GPU memory (tests/gpu/suites.txt) on this machine's real GPUs, side by side, a line
# each:
#
#   tests/gpu/run_real.sh [-s] [-d FOLDER] [-j JOBS] [-t SECONDS] [-o LOGS] [PATTERN]
#   tests/gpu/run_real.sh pack FOLDER
#
# FOLDER: what `pack` made of a build (build/release) here, to be copied to a machine with GPUs; the
# default is the build itself. PATTERN: suites whose name has it (grep -E). SECONDS: for each (100).
# LOGS: what each printed stays in this folder. -s: the kernels' suite under compute-sanitizer instead
# (memcheck, racecheck). 1: something failed. 77: no GPU.
set -u
here=$(cd "$(dirname "$0")" && pwd)

# pack FOLDER: programs and the libraries that they need, scripts, python/dray. The same tree as the
# sources', the build's in bin and lib.
pack() {
    local to=$1 build=${DRAY_BUILD_DIR:-$here/../../build/release}
    mkdir -p "$to/bin" "$to/lib" "$to/tests/gpu" "$to/python"
    cp "$here/run_real.sh" "$here/suites.txt" "$to/tests/gpu/"
    cp -r "$here/../../python/dray" "$to/python/"
    rm -rf "$to"/python/dray/__pycache__
    while read -r suite _; do
        local name=${suite%%:*}
        case $name in
        '' | '#'*) ;;
        *.py | *.sh)
            mkdir -p "$to/tests/${name%%_*}"
            cp "$here/../${name%%_*}/${name#*_}" "$to/tests/${name%%_*}/"
            ;;
        *) cp "$build/$name" "$to/bin/" ;;
        esac
    done <"$here/suites.txt"
    cp "$here"/../mover/test_kernels_python.py "$to/tests/mover/"
    mkdir -p "$to/tests/model"
    cp "$here"/../weights/{formats,on_gpu,served,test_formats_torch,test_quant_torch}.py "$to/tests/weights/"
    cp "$here"/../model/dray.py "$to/tests/model/"
    cp "$here"/../begin.py "$to/tests/"
    cp -L "$build/dray" "$build/libdray.so" "$build/mover_helper_cuda" "$to/bin/"
    for program in "$to"/bin/*; do
        strip -g "$program"
        ldd "$program" | awk '$3 ~ /^\// {print $1, $3}'
    done | sort -u | grep -vE '^(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|dray)|ld-linux)[.-]' |
        while read -r name path; do cp -L "$path" "$to/lib/$name"; done
    cp "$to/bin/libdray.so" "$to/lib/$(objdump -p "$to/bin/libdray.so" | awk '/SONAME/ {print $2}')"
}

# one SUITE GPUS PART: runs it, and says how it went.
one() {
    local suite=$1 needs=$2 part=$3 name=${1%%:*} argument=
    [ "$suite" = "$name" ] || argument=${suite#*:}
    local log=$logs/$name${argument:+.$argument}.${part%/*} begin=$EPOCHREALTIME rc said=ok
    local program=("$DRAY_BUILD_DIR/$name")
    case $name in
    memcheck | racecheck)
        program=("$sanitizer" --tool "$name" --error-exitcode 1 "$DRAY_BUILD_DIR/mover_test_cuda")
        ;;
    *.py) program=(env "PYTHONPATH=$DRAY_SOURCE_DIR/tests" python3 "$DRAY_SOURCE_DIR/tests/${name%%_*}/${name#*_}") ;;
    *.sh) program=(bash "$DRAY_SOURCE_DIR/tests/${name%%_*}/${name#*_}") ;;
    esac
    if [ "$needs" -gt "$gpus" ]; then
        rc=77
    else
        DRAY_TEST_PART=$part timeout -k 2 "$seconds" "${program[@]}" $argument >"$log" 2>&1
        rc=$?
    fi
    [ $rc -eq 0 ] || said=FAILED
    [ $rc -eq 77 ] && said=skipped
    printf '%-8s %-34s %5.1f s%s\n' $said "$name${argument:+ $argument}$(
        [ "${part#*/}" -gt 1 ] && echo " $((${part%/*} + 1))/${part#*/}")" \
        "$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN {print b - a}')" \
        "$([ $said = FAILED ] && echo ", status $rc")"
    if [ $said = FAILED ]; then
        echo x >>"$logs/failed"
        grep -vE '^\[ (RUN|      OK)' "$log" | awk '{line[NR] = substr($0, 1, 400)}
            END {for (i = 1; i <= NR; i++) if (i > NR - 12 || line[i] ~ /^DRAY_TEST_SEED/) print line[i]}'
    fi
}

if [ "${1:-}" = pack ]; then
    set -e
    pack "$2"
    exit 0
fi
folder='' jobs=$(nproc) seconds=100 logs='' sanitizer=''
while getopts sd:j:t:o: option; do
    case $option in
    s) sanitizer=$(PATH=$PATH:/usr/local/cuda/bin command -v compute-sanitizer) || exit 77 ;;
    d) folder=$OPTARG ;;
    j) jobs=$OPTARG ;;
    t) seconds=$OPTARG ;;
    o) logs=$OPTARG ;;
    *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" -eq 0 ]; then
    echo "skipped: no GPU"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -n "$logs" ] || logs=$work
mkdir -p "$logs"
rm -f "$logs/failed"
if [ -n "$folder" ]; then
    folder=$(cd "$folder" && pwd)
    export LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export DRAY_SOURCE_DIR=$folder DRAY_BUILD_DIR=$folder/bin
else
    DRAY_SOURCE_DIR=$(cd "$here/../.." && pwd)
    export DRAY_SOURCE_DIR DRAY_BUILD_DIR=${DRAY_BUILD_DIR:-$DRAY_SOURCE_DIR/build/release}
fi
# Compiled kernels are kept where this run alone looks for them. With one connection a process begins
# on a GPU three times as fast (0.08 s instead of 0.2), and they begin one after the other.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export DRAY_PROGRAM=$DRAY_BUILD_DIR/dray DRAY_LIBRARY=$DRAY_BUILD_DIR/libdray.so DRAY_TEST_CUDA=real \
    XDG_CACHE_HOME=$work OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
export -f one
export gpus seconds logs sanitizer
begin=$SECONDS
suites=$(grep -E "^[a-z]" "$here/suites.txt" | grep -E "${1:-.}")
[ -z "$sanitizer" ] || suites=$'memcheck\nracecheck'
while read -r suite needs parts; do
    for ((i = 0; i < ${parts:-1}; i++)); do
        echo "$suite ${needs:-1} $i/${parts:-1}"
    done
done <<<"$suites" | xargs -P "$jobs" -L 1 bash -c 'one "$@"' one
echo "$((SECONDS - begin)) s on $gpus GPUs, $(cat "$logs/failed" 2>/dev/null | wc -l) failed"
[ ! -e "$logs/failed" ]
