"""examples/gpu with vLLM for the CPU as its engine, in six steps: in the rollout's process, and as a server, which is killed in
mid-run and started anew. Weights come by the plug-in in the middle of responses; each token's log-prob is that of the recorded
version's weights, also behind an update, and behind the server's death. DRAY_SOAK=1: the job with the server learns, too."""
import os
import pathlib
import socket
import sys

import dray.server

SOURCE = pathlib.Path(os.environ["DRAY_SOURCE_DIR"])
os.environ.update(DRAY_PROGRAM=dray.server.program(), VLLM_CPU_KVCACHE_SPACE="1")
sys.path.insert(0, str(SOURCE / "tests" / "run"))
from gpu_jobs import *

if "site-packages" in dray.server.__file__:
    os.environ.pop("PYTHONPATH")  # roles have the wheel, too
COMMON = dict(
    steps=6, warmup__max_steps=0, rollout__prompts=4, rollout__samples=4, rollout__max_new_tokens=24, model__hidden_size=128,
    actor__optimiser_steps=1, actor__weight_decay=1, actor__lr=0.01, actor__warmup_steps=0, eval__prompts=8,
    eval__every=2, checkpoint__every=1, checkpoint__keep=100, limits__wait_seconds=600)


def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def served(**more):
    """The job file of the server, at a port that nobody has."""
    return looked_at("served", **{"8200": str(port()), **more})


def compare(folder, process, what):
    out, errors = process.communicate()
    check(process.returncode == 0, f"{what}: status {process.returncode}: {out}{errors}")
    check_nothing_left(folder)
    found = samples(folder)
    check(len({(s["step"], s["slot"]) for s in found}) >= 6 * 16, f"{what}: {len(found)} samples")
    check(all(s["versions"] == sorted(s["versions"]) and len(s["versions"]) == len(s["response"]) for s in found), "versions")
    check(mixed(found), f"{what}: no sample of two versions")
    plain, continued = gaps(folder, found)
    check(plain < 1e-3 and continued < 1e-3, f"{what}: log-probs differ by {plain} and {continued}")
    return f"{what}: {len(found)} samples, {len(mixed(found))} of several versions: log-probs differ by {plain:.1e}, behind an " \
           f"update by {continued:.1e}"


folder = work / "vllm"
process = start(folder, *settings(**COMMON, roles__rollout__command="exec python3 rollout.py --engine vllm --slots 8"), job=looked_at())
seen = [compare(folder, process, "in the process")]

folder = work / "served"
process = start(folder, *settings(**COMMON), job=served(**{"rollout.py": "rollout.py --slots 8", "serve.py": "serve.py --slots 8"}))
if reached(folder, 2, process):
    kill(folder, "server")
seen.append(compare(folder, process, "served"))
check("starting server anew" in (folder / "events.jsonl").read_text(), "served: the server was not started anew")

if os.environ.get("DRAY_SOAK") == "1":
    folder = work / "learns"
    process = start(folder, *settings(steps=100, warmup__reward=0.3, eval__every=20, limits__wait_seconds=600), job=served())
    out, errors = process.communicate()
    accuracy = [row["eval_accuracy"] for row in rows(folder) if row.get("eval_accuracy") is not None]
    check(process.returncode == 0 and accuracy[-1] > 0.9, f"learns: {accuracy}: {errors}")
    seen.append(f"held-out accuracy {accuracy[0]:.3f} to {accuracy[-1]:.3f}")
print("; ".join(seen))
finish()
