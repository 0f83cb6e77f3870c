"""What the tests of examples/gpu share: its job with one more role, which writes down every sample; and what each token's
log-prob is by the weights of the version that is recorded for it, in one forward pass over the whole response."""
from python_roles import *

import torch
import transformers

transformers.utils.logging.disable_progress_bar()
GPU = SOURCE / "examples" / "gpu"
sys.path.insert(0, str(GPU))
LOOK = """
import json
import dray

with dray.Role() as role, open(role.folder / "look.jsonl", "a") as out:
    for batch in role.batches():
        for i, (prompt, response, log_probs, versions) in enumerate(zip(*(batch.list(name) for name in (
                "prompt", "response", "rollout_log_prob", "response_version")))):
            out.write(json.dumps(dict(start=role.step, step=int(batch.tag("step")[i]), slot=int(batch.slots[i]),
                                      prompt=prompt.tolist(), response=response.tolist(), log_probs=log_probs.tolist(),
                                      versions=versions.tolist())) + "\\n")
        out.flush()
"""


def looked_at(example="job", **replaced):
    """The job file of an example, with that role. replaced: words in it."""
    (work / "look.py").write_text(LOOK)
    text = (GPU / f"{example}.yaml").read_text().replace("cwd: .", f"cwd: {GPU}")
    for old, new in replaced.items():
        assert old in text, old
        text = text.replace(old, new)
    text = text.replace("tasks:", "tasks:\n  - {name: look, needs: [prompt, response, rollout_log_prob, response_version]}", 1)
    path = work / f"{example}.yaml"
    path.write_text(text + f"  - {{name: look, tasks: [look], command: exec python3 {work / 'look.py'}}}\n")
    return path


def samples(folder):
    return [json.loads(line) for line in (folder / "look.jsonl").read_text().splitlines()]


@torch.no_grad()
def log_probs(folder, version, found, dtype):
    """Of each sample's response by a version's weights, in one forward pass over all of them, which are padded behind."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"step-{version:06d}", dtype=dtype)
    model = model.eval().to(device)
    rows = [torch.tensor(sample["prompt"] + sample["response"]) for sample in found]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    with torch.inference_mode():
        scores = model(tokens).logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].tolist()
    return [row[len(sample["prompt"]) - 1:][:len(sample["response"])] for row, sample in zip(scores, found)]


def gaps(folder, found, rounded=None):
    """The largest distance of a recorded log-prob, of tokens whose version is their response's first, and of others; with
    `rounded`, a dtype, also the largest that a forward pass in it has for the same tokens."""
    plain = continued = rounding = 0.0
    for version in sorted({version for sample in found for version in sample["versions"]}):
        having = [sample for sample in found if version in sample["versions"]]
        scores = log_probs(folder, version, having, torch.float32)
        others = log_probs(folder, version, having, rounded) if rounded else scores
        for sample, exact, there in zip(having, scores, others):
            for by, said, is_, other in zip(sample["versions"], sample["log_probs"], exact, there):
                if by != version:
                    continue
                rounding = max(rounding, abs(other - is_))
                if by == sample["versions"][0]:
                    plain = max(plain, abs(said - is_))
                else:
                    continued = max(continued, abs(said - is_))
    return (plain, continued, rounding) if rounded else (plain, continued)


def mixed(found):
    """Samples whose tokens are of several versions."""
    return [sample for sample in found if len(set(sample["versions"])) > 1]
