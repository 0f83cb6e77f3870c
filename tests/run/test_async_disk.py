"""Weights from the disk under schedules whose engines take the newest there is: the trainer removes what it has
written before, whether an engine has read it or not."""
from lineage import *

PAIR = ["roles.engine.instances=2", "roles.engine.ranks=1"]
LATE = ["schedule=async", "staleness=4", "rollout.batching=continuous"]


def disk(settings):
    return words(["weights.mode=disk", *settings])


def check_ended(folder, process_status, said, bounds):
    check(process_status == 0 and "anew" not in said, f"{folder.name}: {said}")
    check_lineage(folder, folder.name, bounds)
    check({p.name for p in (folder / "weights").iterdir()} == {"latest", "step-000005", "step-000006"},
          f"{folder.name}: {sorted((folder / 'weights').iterdir())}")
    check(any(row["update_bytes"] > 0 for row in rows(folder)), f"{folder.name}: no update is told of")


for name, bounds, settings in (("rolling", Bounds("rolling"), ["schedule=rolling", *PAIR]),
                               ("flight", Bounds("async", 4), [*LATE, "update=in_flight"])):
    done = recorded(work / name, *DATA, *disk(settings))
    check_ended(work / name, done.returncode, done.stdout + done.stderr, bounds)
    newer = max(row["weight_version"] for row in rows(work / name))
    check(newer > 0, f"{name}: no newer weights were taken")

# An engine that has chosen a version, and comes to read it when it is gone: the other one goes on meanwhile.
folder = work / "gone"
environment = dict(os.environ, **begin_record(folder), DRAY_FAULT="engine.0:0:updating:0:stop")
latest = folder / "weights" / "latest"
with open(work / "gone.out", "w+") as out:
    process = subprocess.Popen(command(folder, *DATA, *disk([*LATE, *PAIR])), env=environment, cwd=work,
                               stdout=out, stderr=out)
    stopped = []
    while process.poll() is None:
        time.sleep(0.05)
        found = [pid for pid, line in processes_of(folder) if "role engine" in line and state_of(pid) == "T"]
        if found and latest.is_symlink() and int(os.readlink(latest).split("-")[1]) >= 3:
            check(not (folder / "weights" / "step-000000").exists(), "the first version is still there")
            os.kill(found[0], signal.SIGCONT)
            stopped += found
    out.seek(0)
    check(len(stopped) == 1, f"stopped: {stopped}")
    check_ended(folder, process.returncode, out.read(), Bounds("async", 4))
finish()
