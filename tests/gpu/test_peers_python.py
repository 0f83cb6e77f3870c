"""peers: the flows of bench/peers/flows.py move a small model on the CPU and check every element of it; an engine
that loads nothing is found out."""
import json
import os
import subprocess
import sys
import tempfile

FLOWS = os.path.join(os.environ["DRAY_SOURCE_DIR"], "bench/peers/flows.py")
CONFIG = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64,
          "num_experts": 2}


def run(flow, ranks, config, program=FLOWS):
    return subprocess.run([sys.executable, program, flow, config, "--device", "cpu", "--ranks", str(ranks),
                           "--repeat", "2", "--bucket", "1", "--json"], capture_output=True, text=True,
                          timeout=150)


with tempfile.TemporaryDirectory() as work:
    config, broken = os.path.join(work, "config.json"), os.path.join(work, "flows.py")
    with open(config, "w") as file:
        json.dump(CONFIG, file)
    for flow, ranks in ("broadcast", 2), ("ipc", 1), ("server", 2):
        done = run(flow, ranks, config)
        assert done.returncode == 0, (flow, done.stderr)
        found = json.loads(done.stdout)
        assert found["checked"] and len(found["seconds"]) == 2 and found["median_seconds"] > 0, found
    with open(FLOWS) as file:
        text = file.read()
    line = "            self.shards[tensor.name].copy_("
    assert line in text
    with open(broken, "w") as file:
        file.write(text.replace(line, "            torch.clone("))
    done = run("packed", 2, config, broken)
    assert done.returncode and "elements are wrong, first in embed_tokens" in done.stderr, done
