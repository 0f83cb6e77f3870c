"""dray.weights.record with an engine's own models and loaders (vLLM's, or as it is told), on the CPU: tiny random checkpoints of transformers'
own classes, a rank of the engine's parallel groups over a fake process group; blocks against load_weights, all
bytes; and vLLM's updates of six models behind all that it does when it loads them. A fixed dozen of architectures; $DRAY_SOAK: all that the engine builds of them, and models of full size."""
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ENGINE = sys.argv[1] if len(sys.argv) > 1 else "vllm"
SOAK = os.environ.get("DRAY_SOAK") == "1"
DOZEN = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "gemma", "gemma3_text", "gpt_oss",
         "granitemoe", "phi3", "olmo2"]
DOZEN += ["jamba", "Qwen2_5_VLForConditionalGeneration"] if ENGINE == "vllm" else []
POST_LOAD = ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "jamba"]
RANKS = [(1, 0), (2, 1), (4, 3)]
LEAST = {"vllm": {1: 95, 2: 90, 4: 90}, "sglang": {1: 70, 2: 70, 4: 65}}  # classes, in soak
IN_PLACE = {"vllm": 0.99, "sglang": 0.97}  # of parameters


def run(*arguments, **environment):
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=HERE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, **environment}, check=False)
    print(done.stdout, end="", flush=True)
    return done.returncode, done.stdout.splitlines()


said, failed = [], False
for tp, rank in RANKS:
    status, lines = run("models.py", ENGINE, tp, rank, *([] if SOAK else DOZEN),
                        PLANTED="qwen3_moe" if tp == 2 else "")
    try:
        came = json.loads(lines[-1])
    except (IndexError, ValueError):
        sys.exit(f"TP{tp}: ended with {status}, and nothing was said")
    least = LEAST[ENGINE][tp] if SOAK else len(DOZEN)
    failed |= status != 0 or came["equal"] < least or came["in_place"] < IN_PLACE[ENGINE] * came["written"] or \
        came.get("planted", 100) != 100
    said.append(f"TP{tp}: {came['equal']} classes equal, {came['in_place']} of {came['written']} parameters in place"
                + (f", {came['planted']} of 100 planted faults found" if "planted" in came else ""))
if ENGINE == "vllm":
    status, lines = run("post_load.py", *POST_LOAD)
    equal = [line.partition(":")[0] for line in lines if ": equal, " in line]
    failed |= status != 0 or sorted(equal) != sorted(POST_LOAD)
    said.append(f"with what vLLM does behind loading: {', '.join(equal)} equal")
for name in ("30b", "235b") if SOAK and ENGINE == "vllm" else ():
    status, lines = run("fullsize.py", name)
    failed |= status != 0
    said.append(lines[-1] if lines else f"{name}: nothing was said")
print("; ".join(said))
sys.exit(failed)
