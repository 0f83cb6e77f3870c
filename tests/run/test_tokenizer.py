"""A job with a tokenizer of its own: the held-out accuracy that dray measured is the one that transformers gets
with the checkpoint and the tokenizer's own package; a folder that has a tokenizer is read with it."""
from jobs import *

try:
    import torch
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
except ImportError:
    shutil.rmtree(work)
    sys.exit(77)

pairs = [(f"{a} plus {b} is", f" {a + b}") for a in range(10) for b in range(10)]
held, trained = pairs[::4], [p for i, p in enumerate(pairs) if i % 4]
for name, lines in (("train.jsonl", trained), ("held.jsonl", held)):
    (work / name).write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in lines))

theirs = Tokenizer(models.BPE())
theirs.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}|\s+"), "isolated"),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
theirs.decoder = decoders.ByteLevel()
theirs.train_from_iterator([p + a for p, a in pairs], trainers.BpeTrainer(
    vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    special_tokens=["<|begin|>", "<|end|>"]))
theirs.post_processor = processors.TemplateProcessing(
    single="<|begin|> $A", special_tokens=[("<|begin|>", theirs.token_to_id("<|begin|>"))])
END = theirs.token_to_id("<|end|>")
(work / "bpe").mkdir()
theirs.save(str(work / "bpe" / "tokenizer.json"))
OWN = words(("data.source=jsonl", "data.path=train.jsonl", "data.eval_path=held.jsonl", "steps=2",
             "model.tokenizer=bpe/tokenizer.json", "model.hidden_size=32", "model.heads=4", "warmup.max_steps=3000",
             "warmup.reward=0.3", "warmup.lr=3e-3", "eval.prompts=25", "eval.every=1", "checkpoint.every=1"))


def refused(what, *arguments):
    done = run(work / "refused", *arguments)
    check(done.returncode == 2 and what in done.stderr, f"{what}: {done.returncode}, {done.stderr}")
    check(not (work / "refused").exists(), f"{what}: a folder was made")


refused("no token ends a response: model.end_token expected", *OWN)
refused("'<|no|>': no token of", *OWN, "--set", "model.end_token=<|no|>")
refused("bpe/none.json", *OWN, "--set", "model.tokenizer=bpe/none.json")
(work / "bpe" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
length = len(theirs.encode(held[0][0]).ids)
refused(f"a prompt of {length} tokens", *OWN, "--set", f"model.max_positions={length + 3}")

folder = work / "own"
done = run(folder, *OWN)
check(done.returncode == 0, f"own: {done.stderr}")
for row in rows(folder):
    path = folder / "checkpoints" / f"step-{row['step']:06d}"
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    check(model.config.vocab_size == theirs.get_vocab_size(), f"vocabulary: {model.config.vocab_size}")
    check(model.config.eos_token_id == END, f"end token: {model.config.eos_token_id}")
    if row["step"]:  # samples, too, end where the tokenizer says
        check(row["response_length_mean"] < 4, f"all samples are as long as can be: {row}")
    made = prompts = torch.tensor([theirs.encode(p).ids for p, _ in held])  # all of one length
    with torch.no_grad():
        for _ in range(4):
            made = torch.cat([made, model(made).logits[:, -1].argmax(-1, keepdim=True)], 1)
    right = 0
    for tokens, (_, answer) in zip(made[:, prompts.shape[1]:].tolist(), held):
        right += END in tokens and theirs.decode(tokens[:tokens.index(END)]) == answer
    check(abs(right / len(held) - row["eval_accuracy"]) < 1e-9,
          f"step {row['step']}: {right / len(held)} by transformers, {row['eval_accuracy']} by dray")
check(rows(folder)[-1]["eval_accuracy"] > 0, "nothing was learned, nothing compared")

# A folder with a tokenizer is read with it; one whose vocabulary is too small for the tokenizer is refused.
start_from = work / "model"
shutil.copytree(folder / "checkpoints" / "step-000002", start_from)
for name in ("tokenizer.json", "tokenizer_config.json"):  # the checkpoint has them
    check((start_from / name).read_bytes() == (work / "bpe" / name).read_bytes(), f"{name} of a checkpoint is another")
read = transformers.PreTrainedTokenizerFast.from_pretrained(start_from)
check(all(read(p)["input_ids"] == theirs.encode(p).ids for p, _ in held), "transformers reads another tokenizer")
GO_ON = [*OWN, "--set", f"model.checkpoint={start_from}", "--set", "model.tokenizer=", "--set", "warmup.max_steps=0"]
done = run(work / "goes-on", *GO_ON)
check(done.returncode == 0, f"goes on: {done.stderr}")
check(rows(work / "goes-on")[0]["eval_accuracy"] == rows(folder)[-1]["eval_accuracy"], "another tokenizer was used")
theirs.add_tokens([f"<{i}>" for i in range(10)])
theirs.save(str(start_from / "tokenizer.json"))
refused("expected at least the", *GO_ON)
finish()
