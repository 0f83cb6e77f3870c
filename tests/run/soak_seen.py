"""1,000 damaged traces, rows, events, configurations and job files into dray trace, report, simulate and size: none ends by a
signal, none stands still, and what is refused is refused with the file, and where in it. DRAY_TEST_SEED=N draws the same
ones again, DRAY_TEST_CASES=N as many."""
import random
import struct

from jobs import *

SEED = int(os.environ.get("DRAY_TEST_SEED", "0")) or random.randrange(1, 1 << 32)
CASES = int(os.environ.get("DRAY_TEST_CASES", "1000"))
print(f"seed {SEED}")
rng = random.Random(SEED)

CLOCK = ("clock.enabled=true", "clock.token_seconds=0.001", "clock.train_seconds=0.0005", "clock.tokens=4", "steps=8",
         "eval.every=0", "checkpoint.every=1000", "roles.engine.ranks=1", "roles.trainer.ranks=1")
base = work / "base"
done = run(base, *words(CLOCK + ("schedule=one_step_async",)))
check(done.returncode == 0, done.stderr)
job = (base / "config.yaml").read_text()
FILES = ["trace/engine-0-1.spans", "trace/trainer-0-1.spans", "trace/desk-0-1.spans", "trace/engine-0-1.lengths",
         "metrics.jsonl", "events.jsonl", "config.json", "job.yaml"]
WORDS = [b"", b"0", b"-1", b"1e999", b"null", b"[]", b"{}", b'"x"', b"18446744073709551615", b"\xff\xfe", b"\0" * 8,
         b"</script>", b"step", b"1" * 400]



def numbers_in(data):
    """A chunk of spans with numbers changed: a place behind its head. The sum is not put right where it cannot be, and then
    the chunk is an unfinished end."""
    at = rng.randrange(8192 + 16, max(8192 + 17, len(data)))
    value = rng.choice([0, 1, 255, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
    return data[:at] + struct.pack("<Q", value) + data[at + 8:]


def change(data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 20])):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(6)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif how == 1:
            data[at:at + rng.randrange(1, 40)] = b""
        elif how == 2:
            data[at:at] = rng.choice(WORDS)
        elif how == 3 and data:
            data[at:at + rng.randrange(1, 12)] = rng.choice(WORDS)
        elif how == 4:
            del data[at:]
        elif data:
            other = rng.randrange(len(data))
            data[at:at + 60] = data[other:other + 60]
    return bytes(data)


def commands(folder):
    return [["trace", str(folder), *rng.choice([[], ["--json"], ["--from", "2", "--to", "4"],
                                               ["--perfetto", str(work / "out.pftrace")]])],
            ["report", str(folder), "-o", str(work / "out.html")],
            ["simulate", str(folder / "job.yaml"), "--trace", str(folder), *rng.choice([[], ["--json"], ["--set", "schedule=async"]])],
            ["size", str(folder / "job.yaml"), "--trace", str(folder), "--devices", str(rng.choice([2, 3, 8]))]]


def say(command, returncode, stderr, changed, folder):
    kept = work / f"kept-{len(failures)}"
    shutil.copytree(folder, kept)
    check(False, f"{changed} changed: dray {' '.join(command)}: {returncode}: {stderr[-600:]} ({kept})")


slowest, refused = 0.0, 0
folder = work / "case"
for case in range(CASES):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("checkpoints", "weights", "logs", "trace.json", "*.html"))
    (folder / "job.yaml").write_text(job)
    changed = rng.choice(FILES)
    before = (folder / changed).read_bytes()
    spans = changed.endswith(".spans") and rng.random() < 0.5
    (folder / changed).write_bytes(numbers_in(before) if spans else change(before))
    command = rng.choice(commands(folder))
    began = time.monotonic()
    try:
        done = subprocess.run([PROGRAM, *command], capture_output=True, timeout=60, cwd=work)
    except subprocess.TimeoutExpired:
        say(command, "no end in 60 s", "", changed, folder)
        continue
    slowest = max(slowest, time.monotonic() - began)
    stderr = done.stderr.decode(errors="replace")
    if done.returncode not in (0, 1, 2) or (done.returncode and f"dray {command[0]}: " not in stderr):
        say(command, done.returncode, stderr, changed, folder)
    if done.returncode:
        refused += 1
        if not any(word in stderr for word in (str(folder), "job.yaml", "standing", "stands still", "expected")):
            say(command, done.returncode, stderr, changed, folder)
print(f"{CASES} cases, {refused} refused; the slowest took {slowest:.2f} s")
finish()
