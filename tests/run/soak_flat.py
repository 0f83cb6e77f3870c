"""Memory, descriptors and mappings of a run stay what they are, however many steps it makes: the clock job, its sleeps
as good as none, 32 rows a step in five tasks. Of every process (supervisor, coordinator, roles) the last quarter of the
run is compared with the third; of the run's folder the files are counted, and what is appended a step is bounded.

DRAY_TEST_STEPS: steps of each run (20,000). DRAY_TEST_SCHEDULES: some of the names below."""
import statistics

from jobs import *

STEPS = int(os.environ.get("DRAY_TEST_STEPS", 20000))
EVERY = 1.0  # seconds between looks
JOB = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "examples" / "clock.yaml"
ZERO = ("clock.token_seconds=1e-6", "clock.train_seconds=0", f"steps={STEPS}")
RUNS = {
    "sync": (),
    "one_step_async": ("schedule=one_step_async",),
    "journal": ("queue.durability=journal", "checkpoint.every=200"),
}
# Growth that is allowed from the third quarter of a run to its last, where allocators have settled, and the rings of
# spans (2.3 MB a thread) are touched to their ends.
SLACK_KB, SLACK = 512, 0.03
METRICS_BYTES, SPANS_BYTES = 2048, 16384  # a step, at most


def numbers(process):
    """Its own memory and its share of shared memory in KiB, descriptors, mappings; None: the process has ended."""
    entry = pathlib.Path("/proc") / str(process)
    try:
        parts = (line.split() for line in (entry / "smaps_rollup").read_text().splitlines())
        memory = sum(int(part[1]) for part in parts if part[0] in ("Pss_Anon:", "Pss_Shmem:"))
        return (memory, len(list((entry / "fd").iterdir())), len((entry / "maps").read_text().splitlines()))
    except OSError:
        return None


def look(folder):
    """Of each process, by its command line and role."""
    found = {}
    for process, line in processes_of(folder):
        seen = numbers(process)
        if seen:
            found[f"{line.replace(str(folder), 'FOLDER')} ({process})"] = seen
    return found


def step_of(folder):
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            lines = file.read().splitlines()
        return json.loads(lines[-1])["step"] if lines else -1
    except (OSError, ValueError):  # none yet, or half a line
        return -1


def watch(name, settings):
    folder = work / name
    line = [PROGRAM, "run", str(JOB), "--out", str(folder)]
    for setting in (*ZERO, *settings):
        line += ["--set", setting]
    begun = time.monotonic()
    process = subprocess.Popen(line, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    looks = []
    while process.poll() is None:
        time.sleep(EVERY)
        step = step_of(folder)
        if 0 < step < STEPS:  # behind the last the timeline is put together, once
            looks.append((step, look(folder), len(files(folder)), queue_bytes(folder)))
    error = process.communicate()[1]
    check(process.returncode == 0, f"{name}: ends with {process.returncode}: {error}")
    took, usage = time.monotonic() - begun, os.times()
    print(f"{name}: {STEPS} steps in {took:.1f} s, {STEPS / took:.0f} steps/s, {len(looks)} looks, "
          f"{usage.children_user + usage.children_system:.1f} s of CPU so far", flush=True)
    check_nothing_left(folder)
    return folder, looks


def queue_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("queue/*") if path.is_file())


def compare(name, what, early, late, slack):
    if early and late:
        a, b = statistics.median(early), statistics.median(late)
        print(f"  {what}: {a:.0f} to {b:.0f}", flush=True)
        check(b <= a + slack(a), f"{name}: {what} grew from {a:.0f} to {b:.0f}: {early[:3]} ... {late[-3:]}")


def check_flat(name, folder, looks):
    third = [l for l in looks if STEPS / 2 < l[0] < 3 * STEPS / 4]
    last = [l for l in looks if l[0] > 3 * STEPS / 4]
    check(len(third) > 1 and len(last) > 1, f"{name}: too few looks: {len(looks)}")
    processes = set().union(*(l[1] for l in third)) if third else set()
    check(len(processes) >= 5, f"{name}: a supervisor, a coordinator and three roles expected, found {processes}")
    for process in sorted(processes):
        for i, (what, slack) in enumerate((("KiB", lambda a: SLACK_KB + SLACK * a),
                                           ("descriptors", lambda a: 2), ("mappings", lambda a: 2))):
            early, late = ([l[1][process][i] for l in part if process in l[1]] for part in (third, last))
            compare(name, f"{process[-60:]}: {what}", early, late, slack)
            check(bool(late), f"{name}: {process} is another one in the end")
    compare(name, "files", [l[2] for l in third], [l[2] for l in last], lambda a: 0)
    compare(name, "bytes of the journal", [l[3] for l in third], [l[3] for l in last], lambda a: 64 << 20)
    for what, pattern, most in (("metrics", "metrics.jsonl", METRICS_BYTES), ("spans", "trace/*.spans", SPANS_BYTES)):
        size = sum(path.stat().st_size for path in folder.glob(pattern))
        print(f"  {what}: {size / STEPS:.0f} bytes a step", flush=True)
        check(size < most * STEPS, f"{name}: {what}: {size} bytes of {STEPS} steps")


wanted = os.environ.get("DRAY_TEST_SCHEDULES", ",".join(RUNS)).split(",")
for name in wanted:
    where, seen = watch(name, RUNS[name])
    check_flat(name, where, seen)
    shutil.rmtree(where) if not failures else None
finish()
