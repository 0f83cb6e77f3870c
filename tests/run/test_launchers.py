"""One command that Slurm, torchrun or mpirun starts everywhere (`dray join --lead`): rank 0 is the run, the others join it
with the ranks and names that the variables say; the same start again goes on with it. What schedulers are told: the job
as JSON, and a JobSet for Kubernetes, against the fields of its schema. The variables are set by hand here."""
import socket

from jobs import *

JOB = work / "launched.yaml"
JOB.write_text(TINY.replace("steps: 6", "steps: 4") + """
roles:
  - {name: engine, tasks: [rollout, eval], instances: 2, local: 0}
  - {name: trainer, tasks: [old_log_prob, actor]}
  - {name: desk, tasks: [driver, reward, reference, advantage]}
""")
STRAY = work / "stray.yaml"
STRAY.write_text(JOB.read_text() + """
  - {name: helper, tasks: [], local: 0, command: "setsid sleep 1000 & exec sleep 1000", env: [STRAY=%s]}
""" % work.name)
ROLES = "1=engine:1,2-3=engine:1"


def start_all(folder, size, variables, roles=ROLES, more=(), job=JOB):
    """As many processes of the same command; each is a host of its own."""
    return [subprocess.Popen([PROGRAM, "join", "--job", job, "--lead", folder, "--roles", roles, "--wait", "100", *more],
                             cwd=work, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env=dict(os.environ, DRAY_HOST=f"host{rank}", DRAY_DATA_ADDRESS="127.0.0.1",
                                      **variables(rank, size)))
            for rank in range(size)]


def slurm(rank, size, job="77"):
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0",
            "SLURMD_NODENAME": f"node{rank}"}


def torchrun(rank, size):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x",
            "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


def open_mpi(rank, size):
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), "PMIX_NAMESPACE": "mpi.1"}


def launched(name, variables):
    folder = work / name
    processes = start_all(folder, 3, variables)
    said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    check([p.returncode for p in processes] == [0, 0, 0], f"{name}: {[s[-500:] for s in said]}")
    check([row["step"] for row in rows(folder)] == list(range(5)), f"{name}: {said[0][-500:]}")
    return said


said = launched("slurm", slurm)
check("host node1" in said[1] and "host node2" in said[2], f"names: {said}")
launched("torchrun", torchrun)
launched("mpi", open_mpi)



def again(name, before, after):
    """The job is queued again: it goes on with the run in the folder, and not with the start before."""
    folder = work / name
    more = ("--set", "steps=60", "--set", "limits.join_seconds=60")
    first = start_all(folder, 3, before, more=more)
    deadline = time.monotonic() + PATIENCE
    while not (folder / "checkpoints" / "step-000004").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in first:
        process.kill()
    for process in first:
        process.communicate()
    check_nothing_left(folder, sockets=False)
    second = start_all(folder, 3, after, more=more)
    said = [process.communicate(timeout=PATIENCE)[0] for process in second]
    check([p.returncode for p in second] == [0, 0, 0], f"{name}: {[s[-500:] for s in said]}")
    check([row["step"] for row in rows(folder)] == list(range(61)), f"{name}: steps")
    check(json.loads((folder / "run.json").read_text())["epoch"] == 2, f"{name}: which start it is")


again("again", slurm, lambda rank, size: slurm(rank, size, "78"))
again("alike", torchrun, torchrun)  # whose starts have the same name

# Of another start, at whose address somebody listens.
folder = work / "others"
folder.mkdir()
with socket.create_server(("127.0.0.1", 0)) as taken:
    other = {"id": "x", "epoch": 1, "launch": "76/0", "listen": f"tcp:127.0.0.1:{taken.getsockname()[1]}"}
    (folder / "run.json").write_text(json.dumps(other))
    done = subprocess.run([PROGRAM, "join", "--job", JOB, "--lead", folder, "--roles", "engine:1", "--wait", "0"], text=True,
                          cwd=work, capture_output=True, env=dict(os.environ, **slurm(1, 2)), timeout=PATIENCE)
check(done.returncode == 1 and "has not begun" in done.stderr, f"others: {done.stderr}")

# A file of a joined host that cannot be written at home: the host is not lost, and sends it again when it can be.
folder = work / "full"
spans = folder / "trace" / "engine.0-0-1.spans"
spans.mkdir(parents=True)
processes = start_all(folder, 2, slurm, "1=engine:2", ("--set", "steps=100"))
warned = next((line for line in processes[0].stdout if "cannot be brought home" in line), "")
check("node1" in warned and "Is a directory" in warned, f"full: {warned!r}")
spans.rmdir()
said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
check([p.returncode for p in processes] == [0, 0] and "is gone" not in said[0], f"full: {[s[-500:] for s in said]}")
events = json.loads((folder / "trace.json").read_text())["traceEvents"]
check({"engine.0 0", "engine.1 0"} <= {e["args"]["name"] for e in events if e["name"] == "process_name"}, "full: spans")


# A signal ends the wait for a run, and a second one the wait for a run that does not answer.
catches = 1 << (signal.SIGINT - 1)


def caught(pid):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("SigCgt")), 16) & catches


process = subprocess.Popen([PROGRAM, "join", "tcp:127.0.0.1:1", "--job", JOB, "--roles", "engine:1", "--wait", "200",
                            "--token", work / "slurm/tokens/engine.token"], cwd=work, text=True,
                           env=dict(os.environ, DRAY_LISTEN="tcp:127.0.0.1:1"),
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
while process.poll() is None and not caught(process.pid):
    time.sleep(0.02)
began = time.monotonic()
process.send_signal(signal.SIGINT)
said = process.communicate(timeout=PATIENCE)[0]
check(process.returncode == 0 and "left the run" in said, f"waiting: {process.returncode}, {said}")
check(time.monotonic() - began < 60, f"waiting: {time.monotonic() - began:.1f} s")

folder = work / "silent"
processes = start_all(folder, 2, slurm, "1=engine:2", ("--set", "steps=100000", "--set", "eval.every=0"))
for line in processes[1].stdout:
    if "joined" in line:
        break
stopped = [processes[0].pid, *(pid for pid, line in processes_of(folder) if "--coordinator" in line)]
for pid in stopped:
    os.kill(pid, signal.SIGSTOP)
began = time.monotonic()
for _ in range(2):
    processes[1].send_signal(signal.SIGTERM)
    time.sleep(1)
said = processes[1].communicate(timeout=PATIENCE)[0]
check(processes[1].returncode == 0 and "leaving" in said, f"silent: {processes[1].returncode}, {said}")
check(time.monotonic() - began < 25, f"silent: {time.monotonic() - began:.1f} s")
for pid in stopped:
    os.kill(pid, signal.SIGCONT)
processes[0].kill()
processes[0].communicate()

# What a role of a joined host has started outside of its process group ends with the host, too.
folder = work / "stray"
processes = start_all(folder, 2, slurm, "1=engine:2,1=helper:1", job=STRAY)
said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
check([p.returncode for p in processes] == [0, 0], f"stray: {[s[-500:] for s in said]}")
strays = []
for variables in pathlib.Path("/proc").glob("[0-9]*/environ"):
    try:
        told = variables.read_bytes().split(b"\0")
    except OSError:
        continue
    if f"STRAY={work.name}".encode() in told:
        strays.append(int(variables.parent.name))
check(not strays, f"stray: {strays}")
for pid in strays:
    os.kill(pid, signal.SIGKILL)

# Nobody started it; ranks that are none.
for words, why, more in ((["--roles", "engine:1"], "nor mpirun", {}), (["--roles", "2-1=engine:1"], "FIRST-LAST", slurm(1, 2)),
                         (["--roles", "engine:1"], "SLURM_PROCID: expected a number", dict(slurm(1, 2), SLURM_PROCID="x"))):
    done = subprocess.run([PROGRAM, "join", "--job", JOB, "--lead", folder, *words, "--wait", "0"], text=True, cwd=work,
                          capture_output=True, env=dict(os.environ, **more))
    check(done.returncode in (1, 2) and (why in done.stderr or "has not begun" in done.stderr), f"{why}: {done.stderr}")


def printed(form, *more, status=0):
    done = subprocess.run([PROGRAM, "run", "--print", form, JOB, "--set", "listen=tcp:127.0.0.1:7000", *more], text=True,
                          cwd=work, capture_output=True)
    check(done.returncode == status, f"{form}: {done.stderr}")
    return json.loads(done.stdout) if status == 0 else done.stderr


check(printed("job")["roles"][0]["local"] == 0, "the job as JSON")

# Fields of JobSet v1alpha2 (kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go at v0.9.1), and of what it
# embeds from Kubernetes (batch/v1, core/v1): those that a manifest may use here.
FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "metadata": {"name"},
    "spec": {"replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator",
             "managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies"},
    "spec.network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "spec.successPolicy": {"operator", "targetReplicatedJobs"},
    "spec.failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "spec.replicatedJobs": {"name", "groupName", "template", "replicas", "dependsOn"},
    "spec.replicatedJobs.template": {"metadata", "spec"},
    "spec.replicatedJobs.template.spec": {"parallelism", "completions", "backoffLimit", "template"},
    "spec.replicatedJobs.template.spec.template": {"metadata", "spec"},
    "spec.replicatedJobs.template.spec.template.spec": {"restartPolicy", "terminationGracePeriodSeconds", "containers",
                                                        "volumes"},
}


def check_fields(value, path=""):
    if isinstance(value, list):
        for one in value:
            check_fields(one, path)
    elif isinstance(value, dict) and path in FIELDS:
        check(set(value) <= FIELDS[path], f"{path}: {sorted(set(value) - FIELDS[path])}")
        for key, one in value.items():
            check_fields(one, f"{path}.{key}".lstrip("."))


made = printed("k8s", "--image", "registry/dray:1", "--set", "roles.engine.devices=cuda:0-3")
check_fields(made)
jobs = {job["name"]: job for job in made["spec"]["replicatedJobs"]}
check(made["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and made["kind"] == "JobSet", "its kind")
check(set(jobs) == {"run", "engine"} and jobs["engine"]["replicas"] == 2, f"its jobs: {list(jobs)}")
container = jobs["engine"]["template"]["spec"]["template"]["spec"]["containers"][0]
check(container["resources"]["limits"] == {"nvidia.com/gpu": 2}, f"its GPUs: {container}")
listen = {one["name"]: one for one in container["env"]}["DRAY_LISTEN"]["value"]
check(listen == "tcp:tiny-run-0-0.tiny:7000", f"where the run listens: {listen}")
check(container["command"][:6] == ["dray", "join", "--job", str(JOB.resolve()), "--roles", "engine:1"], f"{container}")
check("found none" in printed("k8s", "--set", "roles.engine.local=2", status=2), "a job that leaves no places")
finish()
