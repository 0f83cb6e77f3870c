"""Engine and desk processes are killed at random moments while a job runs; it ends like an
undisturbed one, bit for bit. Then everything may be killed, and the run is resumed until it ends."""
import random

from jobs import *

scale = int(os.environ.get("DRAY_TEST_SCALE", "1"))
seed = int(os.environ.get("DRAY_TEST_SEED", str(random.SystemRandom().randrange(1 << 32))))
print(f"seed {seed} (DRAY_TEST_SEED)", flush=True)
random.seed(seed)
# Of one run so many processes are killed; so many resumed runs are disturbed, then one may end.
STEPS, KILLED, DISTURBED = (150, 30, 20) if scale > 1 else (80, 12, 6)
settings = []
for setting in (f"steps={STEPS}", "eval.every=10", "checkpoint.every=10",
                "limits.restarts=1000", "queue.max_attempts=1000"):
    settings += ["--set", setting]

whole = work / "whole"
done = run(whole, *settings)
check(done.returncode == 0, f"undisturbed: {done.stderr}")


def disturb(process, folder, victims, pause):
    """Kills one of the victims now and then until the run has ended; says how many."""
    killed = 0
    while process.poll() is None:
        try:
            process.wait(random.uniform(0, pause))
        except subprocess.TimeoutExpired:
            pass
        found = [pid for pid, line in processes_of(folder)
                 if pid != process.pid and any(word in line for word in victims)]
        if found and killed < KILLED:
            try:
                os.kill(random.choice(found), signal.SIGKILL)
                killed += 1
            except ProcessLookupError:
                pass
    return killed


for number in range(scale):
    folder = work / f"restarted-{number}"
    with open(work / "out", "w+") as out:
        process = subprocess.Popen(command(folder, *settings), stdout=out, stderr=out, cwd=work)
        killed = disturb(process, folder, ("role engine", "role desk"), 0.2)
        out.seek(0)
        text = out.read()
    check_nothing_left(folder)
    check(process.returncode == 0, f"{killed} killed: {process.returncode}: {text[-1500:]}")
    check(killed > 0, "nobody was killed")
    check_same_run(whole, folder, f"restarted {number}, {killed} killed", steps=STEPS)
    print(f"{killed} killed", flush=True)

    folder = work / f"resumed-{number}"
    total = 0
    for attempt in range(40):
        began = (folder / "config.yaml").exists()
        line = command(folder, resume=True) if began else command(folder, *settings)
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   cwd=work)
        time.sleep(random.uniform(0, 0.2))
        if random.random() < 0.3:
            time.sleep(random.uniform(0.2, 0.6))
            process.kill()  # the supervisor itself
            process.wait()
            check_nothing_left(folder, sockets=False)
            total += 1
            continue
        total += disturb(process, folder, ("role trainer", "--coordinator"),
                         1.0 if attempt < DISTURBED else 1000)
        check_nothing_left(folder, sockets=False)
        if process.returncode == 0:
            break
    check(process.returncode == 0, f"never ended: {process.returncode}")
    check_same_run(whole, folder, f"resumed {number}, {total} killed", steps=STEPS)
    print(f"{total} killed, {attempt + 1} attempts", flush=True)
finish()
