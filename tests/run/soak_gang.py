"""examples/roles with its trainer's two ranks on two hosts (FSDP2 over gloo), and engines on both: it trains as on one
host; and when the host of one rank goes for ever, the run ends, names it, and goes on with --resume on another."""
from python_roles import *
from netspaces import *

make_spaces(3)
STEPS = 6
SET = settings(steps=STEPS, warmup__max_steps=20, warmup__reward=0, rollout__prompts=8, eval__prompts=16, listen=f"tcp:{NET}.1:{PORT}",
               checkpoint__every=1, limits__wait_seconds=60,
               roles__trainer__spread="true", roles__trainer__local=1, roles__rollout__instances=2,
               roles__rollout__local=1, roles__trainer__env="[GLOO_SOCKET_IFNAME=eth0]")


def both(number, folder, **more):
    return join(number, folder, JOB, "trainer,rollout", "--token", folder / "tokens" / "trainer.token", "--shared",
                folder, *SET, **more)


folder = work / "gang"
process = begin(folder, JOB, *SET)
far = both(1, folder)
check(reached(process, 2) or True, "")
link_set(1, "down")
said = end(process, "the gang", 1)
check("host1 is gone" in str(look(process)) , f"{said[-3:]}")
far.kill()
far.communicate()
link_set(1, "up")
(folder / "tokens" / "task.token").unlink()
again = on(0, [PROGRAM, "run", "--resume", folder, "--json"])
read_on(again)
deadline = time.monotonic() + 60
while not (folder / "tokens" / "task.token").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
far = both(2, folder)
end(again, "the gang that went on")
end(far, "the host that took the rank")
found = [row for row in rows(folder) if row["step"]]
check([row["step"] for row in found] == list(range(1, STEPS + 1)), f"steps {[row['step'] for row in found]}")
check(len({row["samples"] for row in found}) == 1, f"samples {found}")
finish()
