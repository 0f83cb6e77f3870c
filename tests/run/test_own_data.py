"""Jobs over one's own prompts: lines that a job cannot train on are refused before anything starts; the
driver may have a role of its own; a run that unlearns says so."""
from jobs import *

OWN = ["--set", "data.source=jsonl", "--set", "data.path=train.jsonl", "--set", "data.eval_path=held.jsonl",
       "--set", "steps=2"]
good = "".join(json.dumps({"prompt": f"{i}=", "answer": str(i % 10)}) + "\n" for i in range(20))
(work / "held.jsonl").write_text(good)

for lines, what in (
        ('{"question": "1=", "answer": "1"}\n', 'train.jsonl:1: expected {"prompt": "...", "answer": "..."}'),
        ('{"question": "1=", "answer": "1"}\n', 'found "question", "answer"'),
        (good + '\n{"prompt": "1=", "answer": 1}\n', 'train.jsonl:22: expected {"prompt"'),
        ('{"prompt": "a\\u0000b", "answer": "1"}\n', "train.jsonl:1: line 1, column 21"),
        ('{"prompt": "", "answer": "1"}\n', "train.jsonl:1: expected"),
        (good + json.dumps({"prompt": "x" * 28, "answer": "1"}) + "\n",
         "train.jsonl:21: a prompt of 29 tokens (the begin token among them) and 4 new ones expected to fit "
         "model.max_positions, 32"),
        (good + '{"prompt": "1=", "answer": "1234"}\n',
         "train.jsonl:21: an answer of 5 tokens (the end token among them) expected within "
         "rollout.max_new_tokens, 4"),
        (good + "\0\0\0\0" + good, "train.jsonl:21: line 1, column"),
        ("\n", "train.jsonl: expected at least one line")):
    (work / "train.jsonl").write_text(lines)
    folder = work / "refused"
    done = run(folder, *OWN)
    check(done.returncode == 2 and what in done.stderr, f"{what}: {done.returncode}, {done.stderr}")
    check(not folder.exists(), f"{what}: {folder} was made")

# A command may grade by answers of any length, but nothing is learned of those that the model has no positions for.
(work / "train.jsonl").write_text(good + json.dumps({"prompt": "1=", "answer": "x" * 99}) + "\n")
by_command = words(("reward.rule=command", "reward.command=while read -r line; do echo 1; done"))
one = "{name: one, rule: command, command: 'while read -r line; do echo 1; done'}"
for name, rewards in (("long", by_command), ("long-too", words([f"rewards=[{one}]"]))):
    done = run(work / name, *OWN, *rewards)
    check(done.returncode == 0 and len(rows(work / name)) == 3, f"{name} answers: {done.stdout} {done.stderr}")
done = run(work / "refused", *OWN, *words([f"rewards=[{one}, {{name: right}}]"]))
said = "train.jsonl:21: an answer of 100 tokens"
check(done.returncode == 2 and said in done.stderr, f"long answers to match: {done.returncode}, {done.stderr}")
done = run(work / "refused", *OWN, *by_command, *words(("warmup.max_steps=5", "warmup.reward=0.1")))
said = "train.jsonl:21: a prompt and an answer of 103 tokens"
check(done.returncode == 2 and said in done.stderr, f"a warm-up with long answers: {done.returncode}, {done.stderr}")
parts = ("{name: engine, tasks: [rollout, eval], ranks: 1}, {name: trainer, tasks: [old_log_prob, actor], ranks: 1, "
         "command: exec false}, {name: desk, tasks: [driver, reward, reference, advantage], ranks: 1}")
done = run(work / "of-its-own", *OWN, *by_command, *words(("warmup.max_steps=5", "warmup.reward=0.1", f"roles=[{parts}]")))
check(said not in done.stderr, f"a trainer of one's own, which does not warm up: {done.returncode}, {done.stderr}")

# Roles apart, each task in the role that it may have.
(work / "train.jsonl").write_text(good)
roles = ", ".join("{name: %s, tasks: [%s], ranks: 1}" % pair for pair in (
    ("engine", "rollout, eval"), ("trainer", "old_log_prob, actor"), ("driver", "driver"), ("grader", "reward"),
    ("frozen", "reference"), ("adder", "advantage")))
for name, extra in (("apart", []), ("no-reference", ["--set", "reference.enabled=false"])):
    done = run(work / name, *OWN, "--set", f"roles=[{roles}]", *extra)
    check(done.returncode == 0 and "anew" not in done.stdout, f"{name}: {done.stdout} {done.stderr}")
    check(len(rows(work / name)) == 3, f"{name}: {len(rows(work / name))} rows")

# Nothing is ever right, but for what was learned before the steps: a large rate forgets it.
job_file.write_text(TINY.replace("warmup: {max_steps: 0}", "warmup: {reward: 0.1, lr: 1e-2}"))
unlearn = ["--set", "steps=12", "--set", "actor.lr=0.5", "--set", "eval.every=4",
           "--set", "eval.prompts=1000"]
done = run(work / "unlearns", *unlearn, json_lines=True)
said = [json.loads(line) for line in done.stdout.splitlines()]
warned = [e["message"] for e in said if e["event"] == "warning"]
check(len(warned) == 1 and "is below the" in warned[0] and "unlearns" in warned[0], f"unlearns: {done.stdout} {done.stderr}")
done = run(work / "learns", *unlearn, "--set", "actor.lr=1e-6", json_lines=True)
check('"warning"' not in done.stdout, f"learns: {done.stdout}")

# Rewards of any size: the summary begins with the first evaluation, also of one below 0, and the error of a mean of
# such rewards is not known.
job_file.write_text(TINY)
(work / "falls.py").write_text('''import sys
for number, line in enumerate(sys.stdin):
    print(float(sys.argv[1]) - number * 0.001, flush=True)
''')
for begin, name in ((-3, "below"), (50, "above")):
    command = f"{sys.executable} falls.py {begin}"
    done = run(work / name, *words(("reward.rule=command", f"reward.command={command}")), json_lines=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    seen = [row["eval_accuracy"] for row in rows(work / name) if "eval_accuracy" in row]
    end = said[-1] if said else {}
    check(done.returncode == 0 and len(seen) == 3, f"{name}: {done.stderr}")
    check((end.get("accuracy_first"), end.get("accuracy_last")) == (seen[0], seen[-1]), f"{name}: {seen}, {end}")
    check(not [e for e in said if e["event"] == "warning"], f"{name}: {done.stdout}")
finish()
