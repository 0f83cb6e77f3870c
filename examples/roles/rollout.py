"""Rollout with transformers' generate: samples of the version that the schedule wants, and held-out answers.
`dray run examples/roles/job.yaml` starts two of it; each is an engine of its own."""
import dray
import numpy as np
import torch

from model import make_model, pad_left
from text import END, PAD

torch.set_num_threads(1)


def generate(model, prompts, most, temperature):
    """Responses and the log-probs of their tokens; temperature 0: greedy."""
    tokens, mask = pad_left(prompts)
    how = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0) if temperature else \
        dict(do_sample=False)
    made = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=most, eos_token_id=END,
                          pad_token_id=PAD, return_dict_in_generate=True, output_logits=True, **how)
    chosen = made.sequences[:, tokens.shape[1]:]
    logits = torch.stack(made.logits, 1) / (temperature or 1)
    found = logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0].numpy()
    lengths = [row.index(END) + 1 if END in row else len(row) for row in chosen.tolist()]
    return ([row[:n] for row, n in zip(chosen.numpy().astype(np.int32), lengths)],
            [row[:n] for row, n in zip(found.astype(np.float32), lengths)])


with dray.Role() as role:
    job = role.config
    most, temperature = job["rollout"]["max_new_tokens"], job["rollout"]["temperature"]
    torch.manual_seed(job["seed"] + 1000 * role.instance + role.epoch)
    model = make_model(job).eval()
    weights = role.weights(model)
    for batch in role.batches():
        version = weights.take(batch)  # that the schedule wants, or the newest one
        if version is None:  # not there yet: the rows are given back
            continue
        evaluates = batch.task == "eval"
        prompts = batch.list("eval_prompt" if evaluates else "prompt")
        with torch.no_grad():
            responses, found = generate(model, prompts, most, 0 if evaluates else temperature)
        batch.set_tag("version", [version] * batch.rows)
        if evaluates:
            batch.set("eval_response", responses)
            continue
        batch.set("response", responses)
        batch.set("rollout_log_prob", found)
        batch.set("response_version", [np.full(len(response), version, np.int32) for response in responses])
        batch.set_tag("tokens", [len(p) + len(r) for p, r in zip(prompts, responses)])
