"""examples/gpu/job.yaml as it stands learns (on the GPUs that there are, else on CPUs). 200 updates of the same job, in whose
middle an engine is killed, another one asked to leave, and a trainer killed and resumed: each token has the log-prob that
the recorded version's weights give, as closely in responses that went on as in others; descriptors and memory stay."""
import contextlib

from gpu_jobs import *

PATIENCE = 7200
UPDATES = int(os.environ.get("DRAY_TEST_UPDATES", "200"))
ROUNDED = torch.bfloat16 if torch.cuda.is_available() else torch.float32  # what engines compute in


def held_out(folder):
    found = [(row["step"], row["eval_accuracy"]) for row in rows(folder) if row.get("eval_accuracy") is not None]
    print(f"held-out: {found}", flush=True)
    return found[-1][1]


def family(process):
    """The process, its children, and theirs: a command may be a shell that has the program as a child."""
    children = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == process:
                children.append(int(path.parent.name))
    return [process, *(each for child in children for each in family(child))]


def held(process):
    """(descriptors, MiB of memory of its own, MiB on the GPU) of a role's processes."""
    return tuple(map(sum, zip(*map(held_by_one, family(int(process))))))


def held_by_one(process):
    status = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text()
    private = sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("Private_"))
    gpu = 0
    if torch.cuda.is_available():
        told = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, check=False).stdout
        gpu = sum(int(line.split(",")[1]) for line in told.splitlines() if line.split(",")[0] == str(process))
    return len(os.listdir(f"/proc/{process}/fd")), private >> 10, gpu


def holdings(folder):
    return {(role, process): held(process) for role in ("trainer", "rollout")
            for process, _ in ranks_of(folder, role).values()}


def check_flat(folder, step, until, process, what):
    """From a step on until another one the processes hold as much."""
    if not reached(folder, step, process, PATIENCE):
        return
    before = holdings(folder)
    if not reached(folder, until, process, PATIENCE):
        return
    for key, now in holdings(folder).items():
        if key in before:
            then = before[key]
            print(f"{what}: {key[0]}: descriptors, MiB, MiB of the GPU: {then} at step {step}, {now} at step {until}", flush=True)
            check(now[0] <= then[0] + 2 and now[1] <= 1.1 * then[1] + 16 and now[2] <= then[2] + 16, f"{what}: {key}: {then}, {now}")


folder = work / "learns"
process = start(folder, job=GPU / "job.yaml")
out, errors = process.communicate(timeout=PATIENCE)
check(process.returncode == 0, f"status {process.returncode}: {errors}")
check_nothing_left(folder)
check(held_out(folder) > 0.9, "it did not learn")
check(max(row["staleness_max"] for row in rows(folder)) <= 1, "staleness")

folder = work / "faults"
process = start(folder, *settings(steps=UPDATES, checkpoint__every=1, checkpoint__keep=1000, eval__every=0, eval__prompts=64,
                                  rollout__prompts=16, roles__rollout__instances=2, roles__rollout__command=(
                                      "exec python3 rollout.py --slots 16")), job=looked_at())
check_flat(folder, UPDATES // 20, UPDATES // 5, process, "at first")
kill(folder, "rollout", instance="0")
if reached(folder, UPDATES // 3, process, PATIENCE):
    os.kill(ranks_of(folder, "rollout")["1"][0], signal.SIGTERM)
if reached(folder, UPDATES // 2, process, PATIENCE):
    kill(folder, "trainer")
out, errors = process.communicate(timeout=PATIENCE)
check(process.returncode == 1 and f"dray run --resume {folder}" in errors, f"{out}{errors}")
process = start(folder, resume=True)
check_flat(folder, UPDATES * 3 // 5, UPDATES - 3, process, "resumed")
out, errors = process.communicate(timeout=PATIENCE)
check(process.returncode == 0, f"resumed: status {process.returncode}: {errors}")
check_nothing_left(folder)
check([row["step"] for row in rows(folder)] == list(range(UPDATES + 1)), "steps")
check(all(row["samples"] == 128 and row["staleness_max"] <= 1 for row in rows(folder)[1:]), "samples")
found = samples(folder)
again = max(s["start"] for s in found)  # versions behind it were made twice: what the first ones made cannot be compared
found = [s for s in found if s["start"] == again or max(s["versions"]) <= again]
check(all(s["versions"] == sorted(s["versions"]) and len(s["versions"]) == len(s["response"]) for s in found), "versions")
plain, continued, rounding = gaps(folder, found, ROUNDED)
print(f"{len(found)} samples, {len(mixed(found))} of several versions: log-probs differ by {plain:.2e}, behind an update by "
      f"{continued:.2e}; by {rounding:.2e} in a forward pass of {ROUNDED} itself")
most = 1e-4 + 2 * rounding
check(mixed(found) and plain < most and continued < most, f"log-probs differ by {plain} and {continued}, {most} expected")
finish()
