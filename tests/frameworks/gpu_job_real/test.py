"""examples/gpu/job.yaml with vLLM for the CPU as its engine: weights by the plug-in in the middle of responses, in six steps; each
token's log-prob is that of the recorded version's weights, also behind an update."""
import os
import pathlib
import sys

import dray.server

SOURCE = pathlib.Path(os.environ["DRAY_SOURCE_DIR"])
os.environ.update(DRAY_PROGRAM=dray.server.program(), VLLM_CPU_KVCACHE_SPACE="1")
sys.path.insert(0, str(SOURCE / "tests" / "run"))
from gpu_jobs import *

if "site-packages" in dray.server.__file__:
    os.environ.pop("PYTHONPATH")  # roles have the wheel, too
folder = work / "vllm"
process = start(folder, *settings(
    steps=6, warmup__max_steps=0, rollout__prompts=4, rollout__samples=4, rollout__max_new_tokens=24, model__hidden_size=128,
    actor__optimiser_steps=1, actor__weight_decay=1, actor__lr=0.01, actor__warmup_steps=0, eval__prompts=8,
    eval__every=2, checkpoint__every=1, checkpoint__keep=100, limits__wait_seconds=300,
    roles__rollout__command="exec python3 rollout.py --engine vllm --slots 8"), job=looked_at())
out, errors = process.communicate()
check(process.returncode == 0, f"status {process.returncode}: {out}{errors}")
found = samples(folder)
check(len(found) >= 6 * 16, f"{len(found)} samples")
check(all(s["versions"] == sorted(s["versions"]) and len(s["versions"]) == len(s["response"]) for s in found), "versions")
check(mixed(found), "no sample of two versions")
plain, continued = gaps(folder, found)
check(plain < 1e-3 and continued < 1e-3, f"log-probs differ by {plain} and {continued}")
print(f"{len(found)} samples, {len(mixed(found))} of several versions: log-probs differ by {plain:.1e}, behind an update by {continued:.1e}")
finish()
