"""What the tests of examples/roles share: the job as it stands, run with this Python."""
from jobs import *

import importlib.util

SOURCE = pathlib.Path(os.environ["DRAY_SOURCE_DIR"])
if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
    print("PyTorch or transformers is missing")
    shutil.rmtree(work)
    sys.exit(77)
from safetensors.torch import load_file  # noqa: F401

EXAMPLES = SOURCE / "examples" / "roles"
JOB = EXAMPLES / "job.yaml"
os.environ.update(PATH=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
                  PYTHONPATH=str(SOURCE / "python"), PYTHONDONTWRITEBYTECODE="1")


def settings(**given):
    """As --set wants them; two "_" stand for a dot: steps=2, eval__every=1."""
    return [word for name, value in given.items() for word in ("--set", f"{name.replace('__', '.')}={value}")]


def ranks_of(folder, role, rank="0"):
    """{instance: (process, its environment)} of a role's rank that runs now: the one that began first, as its children have its
    environment."""
    found, began = {}, {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            env = dict(pair.split("=", 1) for pair in (entry / "environ").read_text().split("\0") if "=" in pair)
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, ValueError):
            continue
        if env.get("DRAY_RUN") == str(folder) and env.get("DRAY_ROLE") == role and \
                env.get("DRAY_RANK") == rank and stat[0] != "Z" and int(stat[19]) < began.get(env["DRAY_INSTANCE"], 1 << 62):
            began[env["DRAY_INSTANCE"]] = int(stat[19])  # numbers of processes begin anew
            found[env["DRAY_INSTANCE"]] = int(entry.name), env
    return found


def reached(folder, step, process, seconds=600):
    """Waits until the run's metrics have the step."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if any(row["step"] >= step for row in rows(folder)):
                return True
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    return False


def kill(folder, role, rank="0", instance=None):
    """Kills a rank of the role; of which instance."""
    found = ranks_of(folder, role, rank)
    check(found, f"no rank {rank} of {role} runs")
    if not found:
        return None
    instance = instance or sorted(found)[0]
    os.kill(found[instance][0], signal.SIGKILL)
    return instance


def check_samples(folder, steps, batch):
    """Every step trained as many samples as it should, each once, of the version before it."""
    found = [row for row in rows(folder) if row["step"]]
    check([row["step"] for row in found] == list(range(1, steps + 1)), f"steps: {[r['step'] for r in found]}")
    check(all(row["samples"] == batch and row["weight_version"] == row["step"] - 1 and
              row["staleness_max"] == 0 for row in found), f"samples of {folder}: {found}")
