"""A server of vLLM or SGLang as a role without tasks, of the job's model, whose weights `rollout.py --server` has it take. In
the job file it has `ready: http://127.0.0.1:PORT/health`, and the rollout `after: [server]` (served.yaml). What stands behind
`--` are the server's own options."""
import json
import os
import sys

import dray
from lm import arguments, config_json, described

at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
sys.argv, more = sys.argv[:at], sys.argv[at + 1:]
options = arguments(__doc__, slots=(0, "requests at a time (0: the job's rollout.micro_batch)"), port=(8200, "where it listens, of this host alone"),
                    engine=(("vllm", "sglang"), "whose server it is"))
role = dray.Role()
job, cpu = role.config, options.device.type == "cpu"
slots = options.slots or job["rollout"]["micro_batch"]
folder = role.folder / f"{role.group}-model"
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text(config_json(described(job, options)))
same = ["--host", "127.0.0.1", "--port", str(options.port), "--load-format", "dummy", "--skip-tokenizer-init",
        "--dtype", str(options.dtype).rpartition(".")[2]]
if options.engine == "vllm":
    os.environ.update(VLLM_SERVER_DEV_MODE="1", OMP_NUM_THREADS=str(options.threads))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Scheduling ahead would count a step that was begun before an update to the version behind it.
    command = ["vllm.entrypoints.openai.api_server", "--model", str(folder), *same, "--enable-scale-out", "--no-async-scheduling",
               "--max-model-len", str(job["model"]["max_positions"]), "--max-num-seqs", str(slots),
               "--seed", str(job["seed"] + role.epoch), "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log",
               "--weight-transfer-config", json.dumps({"backend": "dray"}),
               "--worker-extension-cls", "dray.integrations.vllm_engine.Reports", *(["--enforce-eager"] if cpu else [])]
else:
    command = ["sglang.launch_server", "--model-path", str(folder), *same, "--max-running-requests", str(slots),
               "--context-length", str(job["model"]["max_positions"]), "--random-seed", str(job["seed"] + role.epoch),
               *(["--device", "cpu"] if cpu else [])]
os.execv(sys.executable, [sys.executable, "-m", *command, *more])
