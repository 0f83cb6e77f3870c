"""vLLM in the place of engine.py: the same requests, and weights by dray's plug-in (docs/vllm.md), whose worker subscribes to
what the trainer publishes. `rollout.py --engine vllm`, with the Python that has vLLM. Of schedules that keep one version."""
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # steps are taken here, one by one
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from dray.integrations.vllm import register  # noqa: E402


class Engine:
    """As engine.Engine. Without scheduling ahead a step's tokens are of the weights that there are in it."""

    def __init__(self, folder, slots, room, end, seed, dtype):
        register()  # where this process has dray on its path alone
        self.slots, self.room, self.end, self.version, self._count = {}, room, end, -1, 0
        self._most = slots
        self.llm = LLM(str(folder), load_format="dummy", dtype=dtype, skip_tokenizer_init=True, max_model_len=room,
                       max_num_seqs=slots, seed=seed, async_scheduling=False, logprobs_mode="processed_logprobs",
                       enforce_eager=os.environ.get("VLLM_EAGER", "1") == "1",
                       weight_transfer_config=WeightTransferConfig(backend="dray"))

    @property
    def under_way(self):
        return list(self.slots.values())

    @property
    def free(self):
        return self._most - len(self.slots)

    def add(self, request):
        request.check(self.version)
        self._count += 1
        name, stop = f"request-{self._count}", min(request.stop or request.most, request.most)
        settings = SamplingParams(
            temperature=request.temperature, max_tokens=stop - len(request.tokens), logprobs=0, detokenize=False,
            ignore_eos=True, stop_token_ids=None if request.forced else [self.end], output_kind=RequestOutputKind.DELTA)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": [*request.prompt, *request.tokens]}, settings)
        self.slots[name] = request

    def changed(self, version, keep=False):
        self.version = version
        for request in self.under_way:
            request.check(version)
        if not keep:  # the prefix that there is, by the new weights
            again = self.cut()
            self.llm.reset_prefix_cache()
            for request in again:
                self.add(request)

    def cut(self):
        found = self.under_way
        if found:
            self.llm.llm_engine.abort_request(list(self.slots))
        self.slots = {}
        return found

    def handshake(self, told):
        self.llm.init_weight_transfer_engine({"init_info": {"address": os.environ["DRAY_ADDRESS"], **told}})

    def take(self, version, newer):
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"version": version, "newer": newer}})
        self.llm.finish_weight_update()
        return self.llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine.report

    def forget(self):
        """vLLM keeps its caches."""

    def step(self):
        left = []
        for made in self.llm.llm_engine.step():
            request = self.slots.get(made.request_id)
            if request is None:  # aborted
                continue
            output = made.outputs[0]
            for token, scores in zip(output.token_ids, output.logprobs or ()):
                request.tokens.append(int(token))
                request.log_probs.append(scores[token].logprob)
                request.versions.append(self.version)
                request.ended = not request.forced and int(token) == self.end
            if made.finished:
                left.append(self.slots.pop(made.request_id))
        return left
