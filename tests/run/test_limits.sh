# dray run where there is little of something: each time it ends, and says what was missing and where. And
# what a reward's command may see, and where a run's files may lie.
set -eu
work=$(mktemp -d)
mounted=
cleanup()
{
    [ -z "$mounted" ] || umount "$mounted" || true
    rm -rf "$work"
}
trap cleanup EXIT
[ -x "$DRAY_PROGRAM" ] || exit 77
fail()
{
    echo "FAILED: $*" >&2
    cat "$work"/*.out >&2
    exit 1
}
cat >"$work/job.yaml" <<'JOB'
name: tiny
steps: 2
model: {hidden_size: 16, intermediate_size: 32, layers: 1, heads: 2}
data: {digits: 2}
warmup: {max_steps: 5, reward: 0, batch: 8, check_every: 5}
rollout: {prompts: 4, samples: 4, max_new_tokens: 4, micro_batch: 4}
reward: {micro_batch: 4}
actor: {optimiser_steps: 2, micro_batch: 4, epochs: 2}
eval: {every: 2, prompts: 12, micro_batch: 4}
checkpoint: {every: 2}
JOB

# run NAME LIMIT [OUT]: what it says is in NAME.out, its exit status in $status.
run()
{
    status=0
    (ulimit $2 && exec timeout -k 2 60 "$DRAY_PROGRAM" run "$work/job.yaml" --out "${3:-$work/$1}") \
        >"$work/$1.out" 2>&1 || status=$?
}

# says NAME WORD...: it failed, and its last line has all these words.
says()
{
    name=$1
    shift
    [ $status = 1 ] || fail "$name: exit status $status"
    for word; do
        tail -n 1 "$work/$name.out" | grep -qF -- "$word" || fail "$name: the last line has no '$word'"
    done
}

for blocks in 1 8 64; do
    run "file-$blocks" "-f $blocks"
    says "file-$blocks" 'File too large' 'ulimit -f'
done
for files in 20 24; do
    run "files-$files" "-n $files"
    says "files-$files" 'ulimit -n'
done
for memory in 70000 85000 100000 115000 130000; do
    run "memory-$memory" "-v $memory"
    [ $status = 0 ] || says "memory-$memory" 'ulimit -v'
done
DRAY_OPENBLAS_LIBRARY=$work/none run blas '-n 1024'
says blas 'need OpenBLAS' "$work/none" 'pip install scipy-openblas32'

if [ "$(id -u)" = 0 ] && mkdir "$work/disk" && mount -t tmpfs -o size=64k tmpfs "$work/disk" 2>/dev/null; then
    mounted=$work/disk
    run disk '-n 1024' "$work/disk/out"
    says disk 'No space left on device' "$work/disk/out/"
else
    echo 'a full disk is not tried: nothing can be mounted here'
fi

# A file of somebody else's stays as it is.
for name in .lock metrics.jsonl .config.yaml.partial logs/coordinator.log logs/engine-0.log trace/engine-0-1.spans; do
    rm -rf "$work/links"
    mkdir -p "$work/links/logs" "$work/links/trace"
    echo precious >"$work/precious"
    ln -s "$work/precious" "$work/links/$name"
    run "links" '-n 1024'
    [ "$(cat "$work/precious")" = precious ] || fail "$name: what it links to was changed"
    grep -qF 'symbolic link' "$work/links.out" || fail "$name: nobody says that it is a link"
done

# What a command is told, and has open.
cat >>"$work/job.yaml" <<JOB
reward:
  rule: command
  command: 'env >$work/env; ls -l /proc/self/fd >$work/fds; while read line; do echo 0; done'
JOB
sed -i '/^reward: {/d' "$work/job.yaml"
echo 'dray1.secret' >"$work/token"
export DRAY_TOKEN=dray1.secret DRAY_TOKEN_FILE=$work/token
export DRAY_REDIS_PASSWORD=secret DRAY_REDIS_PASSWORD_FILE=$work/token OTHER=kept
run command '-n 1024'
[ $status = 0 ] || fail 'a reward by a command'
grep -qx OTHER=kept "$work/env" || fail 'the command has no environment'
! grep -q '^DRAY_.*\(TOKEN\|PASSWORD\)' "$work/env" || fail 'the command sees secrets'
! grep -e '->' "$work/fds" | grep -qvE ' ([012] -> |[0-9]+ -> /proc/)' || fail 'the command has descriptors of ours'
