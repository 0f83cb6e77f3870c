"""What a run writes is what transformers reads: the held-out accuracy that dray measured with its
engine is the one that transformers gets with the checkpoint, and log-probs agree."""
from jobs import *

try:
    import torch
    import transformers
except ImportError:
    shutil.rmtree(work)
    sys.exit(77)

BEGIN, END = 257, 258
pairs = [(f"{n:02d}=", f"{n:02d}"[::-1]) for n in range(100)]
held, trained = pairs[::4], [p for i, p in enumerate(pairs) if i % 4]
for name, lines in (("train.jsonl", trained), ("held.jsonl", held)):
    (work / name).write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n"
                                     for p, a in lines))
for family in ("qwen2", "llama", "qwen3"):
    folder = work / family
    done = run(folder, *words((
        "steps=4", f"model.family={family}", "model.hidden_size=32", "model.heads=4",
        "model.kv_heads=2",  # qkv_bias: the family's
        "data.source=jsonl", "data.path=train.jsonl", "data.eval_path=held.jsonl",
        "warmup.max_steps=2000", "warmup.reward=0.3", "warmup.lr=3e-3", "eval.prompts=25",
        "eval.every=1", "checkpoint.every=1")))
    check(done.returncode == 0, f"{family}: {done.stderr}")
    for row in rows(folder):
        path = checkpoint(folder, row["step"])
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        check(model.config.model_type == family, f"{family}: {model.config.model_type}")
        prompts = torch.tensor([[BEGIN, *p.encode()] for p, _ in held])
        made = prompts
        with torch.no_grad():
            for _ in range(4):
                made = torch.cat([made, model(made).logits[:, -1].argmax(-1, keepdim=True)], 1)
        right = 0
        for tokens, (_, answer) in zip(made[:, prompts.shape[1]:].tolist(), held):
            tokens = tokens[:tokens.index(END)] if END in tokens else tokens
            right += tokens == list(answer.encode())
        check(abs(right / len(held) - row["eval_accuracy"]) < 1e-9,
              f"{family}, step {row['step']}: {right / len(held)} by transformers, "
              f"{row['eval_accuracy']} by dray")
    check(rows(folder)[-1]["eval_accuracy"] > 0, f"{family}: nothing was learned, nothing compared")
finish()
