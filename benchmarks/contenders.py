"""The contenders of `speed.py`. Each runs in a process of its own and measures itself.

`python contenders.py SPECIFICATION` makes one contender, then answers requests until stdin ends. Specification,
requests and answers are JSON, the latter a line each:

    {"task": "decode", "batch": 1, "context": 16, "new_tokens": 128}  ->  {"seconds": 0.61, "tokens": [...], ...}
    {"task": "train", "batch": 4, "length": 256, "autocast": true}  ->  {"error": "..."}

It imports nothing of the project at the top: vLLM runs it in an environment that need not have the package.
"""

import itertools
import json
import os
import sys
import time
from functools import cached_property
from pathlib import Path

import torch


class Contender:
    """A model in one precision, loaded when it is first needed; subclasses say how it loads and generates.

    Args:
        path: the file or folder to load.
        dtype: "float32", "bfloat16", or "int8": weights of 8 bits, and bfloat16 for everything else.
        threads: how many it may use.
        vocab_size: prompts are drawn from it.
    """

    package: str  # what to install for it

    def __init__(self, path: str, dtype: str, threads: int, vocab_size: int, **options):
        self.path, self.dtype, self.threads, self.vocab_size = path, dtype, threads, vocab_size
        self.options = options

    def load_model(self):
        raise NotImplementedError(f"{type(self).__name__} does not load")

    def token_times(self, prompts: torch.Tensor, new_tokens: int) -> tuple[list[float], list[int]]:
        """Continue prompts [B, S] greedily, whatever the tokens; time 0 is when they are handed over.

        Returns:
            When each of the new tokens was there for all rows, in seconds, and the first row's new tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} does not generate")

    @cached_property
    def model(self):
        return self.load_model()

    def start(self):
        """Seconds to get ready to generate, with all imports."""
        start = time.perf_counter()
        _ = self.model
        return {"seconds": time.perf_counter() - start}

    def load(self):
        """Seconds to load the model once more; the file is in the memory of the operating system by then."""
        start = time.perf_counter()
        self.load_model()
        return {"seconds": time.perf_counter() - start}

    def prompts(self, batch: int, length: int) -> torch.Tensor:
        """Random tokens [B, S], always the same; the first three tokens of the vocabulary are special."""
        return torch.randint(3, self.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))

    def decode(self, batch: int, context: int, new_tokens: int):
        """Seconds for `new_tokens` steps of one token a row, behind prompts of `context` tokens.

        They run from the first new token to the last. The difference of a long and a short call would say the same,
        but with the noise of two prefills, which take longer than the steps.
        """
        times, tokens = self.token_times(self.prompts(batch, context), new_tokens + 1)
        return {"seconds": times[-1] - times[0], "tokens": tokens}

    def prefill(self, batch: int, length: int):
        """Seconds until the first new token."""
        times, tokens = self.token_times(self.prompts(batch, length), 1)
        return {"seconds": times[0], "tokens": tokens}


class TorchContender(Contender):
    """A PyTorch model that generates with a streamer and gives a loss; `compiled` runs it through torch.compile."""

    package = "torch"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "int8" else getattr(torch, self.dtype)

    def generate(self, prompts: torch.Tensor, new_tokens: int, streamer) -> torch.Tensor:
        raise NotImplementedError

    def loss(self, model, input_ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=input_ids, labels=input_ids, use_cache=False).loss

    def token_times(self, prompts, new_tokens):
        stamps = Stamps()
        _ = self.model
        start = time.perf_counter()
        output = self.generate(prompts, new_tokens, stamps)
        # A streamer gets the prompt first.
        return [stamp - start for stamp in stamps.times[1:]], output[0, prompts.shape[1] :].tolist()

    @cached_property
    def training(self):
        """The model (compiled on demand) and its optimizer."""
        model = self.load_model().train()
        forward = torch.compile(model) if self.options.get("compiled") else model
        return forward, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train(self, batch: int, length: int, autocast: bool):
        """Seconds for forward, backward and AdamW; `autocast` computes in bfloat16 what float32 is not needed for."""
        model, optimizer = self.training
        input_ids = self.prompts(batch, length)
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = self.loss(model, input_ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"seconds": time.perf_counter() - start, "loss": loss.item()}


class Stamps:
    """A streamer that keeps when it was called."""

    def __init__(self):
        self.times = []

    def put(self, tokens):
        self.times.append(time.perf_counter())

    def end(self):
        pass


class Transformers(TorchContender):
    """Any causal language model of transformers, from a folder."""

    package = "transformers"

    def load_model(self):
        from transformers import AutoModelForCausalLM, GenerationConfig

        quantization = None
        if self.dtype == "int8":
            from torchao.quantization import Int8WeightOnlyConfig
            from transformers import TorchAoConfig

            quantization = TorchAoConfig(Int8WeightOnlyConfig())
        model = AutoModelForCausalLM.from_pretrained(
            self.path, dtype=self.torch_dtype, quantization_config=quantization
        )
        model.generation_config = GenerationConfig(pad_token_id=0)  # without eos, nothing ends early
        model.config.output_router_logits = True  # asks Qwen3-MoE for its balance loss; MiniMind has it in any case
        return model

    @cached_property
    def generation_options(self) -> dict:
        return static_and_compiled() if self.options.get("compiled") else {}

    def generate(self, prompts, new_tokens, streamer):
        mask = torch.ones_like(prompts)
        options = {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False, "streamer": streamer}
        return self.model.generate(prompts, **options, **self.generation_options)


def static_and_compiled() -> dict:
    """Arguments for `generate`: a cache of fixed size, and a forward compiled with the compiler's defaults."""
    from transformers import CompileConfig

    compile_config = CompileConfig(dynamic=False, mode="default")
    compile_config._compile_all_devices = True  # on the CPU, too
    return {"cache_implementation": "static", "compile_config": compile_config, "disable_compile": False}


class MiniMind(Transformers):
    """The model of this package."""

    package = "minimind-hf"

    def load_model(self):
        import minimind_hf  # noqa: F401

        return super().load_model()

    @cached_property
    def generation_options(self):
        if not self.options.get("compiled"):
            return {}
        from minimind_hf.speed import fast_generation

        return fast_generation(self.model)

    def convert(self, source: str, destination: str):
        """Seconds to convert a .pth file to a folder, verified."""
        from minimind_hf.convert import to_hf

        start = time.perf_counter()
        to_hf(Path(source), Path(destination), dtype=self.dtype, overwrite=True)
        return {"seconds": time.perf_counter() - start}


class Reference(TorchContender):
    """The reference implementation, imported from a checkout of it."""

    package = "transformers"

    def load_model(self):
        sys.path.insert(0, self.options["checkout"])
        from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

        # As its own scripts load: fresh weights first, then those of the file.
        model = MiniMindForCausalLM(MiniMindConfig(**self.options["sizes"]))
        model.load_state_dict(torch.load(self.path, weights_only=True))
        return model.to(self.torch_dtype).eval()

    def generate(self, prompts, new_tokens, streamer):
        # Plain argmax: with its defaults it would sort and filter the logits at each step.
        plain = {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
        return self.model.generate(prompts, max_new_tokens=new_tokens, streamer=streamer, **plain)

    def loss(self, model, input_ids):
        output = model(input_ids, labels=input_ids)
        return output.loss + output.aux_loss


class LlamaCpp(Contender):
    """A GGUF file in llama.cpp, by its C interface, with its defaults: float16 cache, prefill in parts of 512."""

    package = "llama-cpp-python"

    def load_model(self):
        import llama_cpp as library

        self.library = library
        self.say_nothing = library.llama_log_callback(lambda *_: None)  # a reference, which llama.cpp does not hold
        library.llama_log_set(self.say_nothing, None)
        parameters = library.llama_model_default_params()
        if self.dtype == "int8":
            parameters.use_extra_bufts = False  # repacked for AMX, q8_0 kills some builds
        model = library.llama_model_load_from_file(self.path.encode(), parameters)
        if not model:
            raise ValueError(f"llama.cpp does not load {self.path}")
        self.contexts, self.greedy = {}, library.llama_sampler_init_greedy()
        return model

    def context(self, rows: int, length: int):
        """A context for so many sequences of so many tokens; the last one is kept for each number of rows."""
        if (rows, length) not in self.contexts:
            options = self.library.llama_context_default_params()
            options.n_seq_max, options.n_ctx, options.n_batch = rows, rows * -(-length // 256) * 256, rows * length
            options.n_threads = options.n_threads_batch = self.threads
            self.contexts[rows, length] = self.library.llama_init_from_model(self.model, options)
        return self.contexts[rows, length]

    def fill(self, batch, tokens: list[list[int]], position: int) -> list[int]:
        """Write tokens of each row, from a position on, into a batch; return the places of each row's last."""
        batch.n_tokens = index = 0
        places = []
        for row, of_row in enumerate(tokens):
            for offset, token in enumerate(of_row):
                batch.token[index], batch.pos[index], batch.logits[index] = token, position + offset, False
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                index += 1
            batch.logits[index - 1] = True
            places.append(index - 1)
        batch.n_tokens = index
        return places

    def token_times(self, prompts, new_tokens):
        rows, length = prompts.shape
        _ = self.model
        library, context = self.library, self.context(rows, length + new_tokens)
        library.llama_memory_clear(library.llama_get_memory(context), True)
        batch = library.llama_batch_init(prompts.numel(), 0, 1)
        places, times, first_row = self.fill(batch, prompts.tolist(), 0), [], []
        start = time.perf_counter()
        for position in range(length, length + new_tokens):
            if library.llama_decode(context, batch) != 0:
                raise ValueError("llama.cpp could not run a batch")
            tokens = [library.llama_sampler_sample(self.greedy, context, place) for place in places]
            times.append(time.perf_counter() - start)
            first_row.append(tokens[0])
            places = self.fill(batch, [[token] for token in tokens], position)
        library.llama_batch_free(batch)
        return times, first_row


class VLLM(Contender):
    """A folder in vLLM, in this process; without prefix caching, which would leave nothing to prefill."""

    package = "vllm"
    numbers = itertools.count()

    def load_model(self):
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        from vllm import LLM

        room = {"max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 8 * 2048}  # prefills in one step
        llm = LLM(self.path, dtype=self.dtype, enable_prefix_caching=False, skip_tokenizer_init=True, **room)
        return llm.llm_engine

    def token_times(self, prompts, new_tokens):
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        rows, times, engine = {}, [], self.model
        start = time.perf_counter()
        for prompt in prompts.tolist():
            rows[number := str(next(self.numbers))] = []
            engine.add_request(number, {"prompt_token_ids": prompt}, greedy)
        while engine.has_unfinished_requests():
            rows |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
            complete = min(map(len, rows.values()))
            times += [time.perf_counter() - start] * (complete - len(times))
        return times, list(next(iter(rows.values())))


class Machine(Contender):
    """What the machine can do at best."""

    package = "torch"

    @cached_property
    def memory(self) -> torch.Tensor:
        return torch.ones(self.options["read_bytes"] // 4)

    @cached_property
    def matrix(self) -> torch.Tensor:
        return torch.randn(2, self.options["product_size"], self.options["product_size"])

    def read(self):
        """Seconds to read a tensor of `read_bytes` bytes, the best of five."""
        return {"seconds": min(seconds(self.memory.sum) for _ in range(5))}

    def product(self, dtype: str):
        """Seconds for a product of two square matrices, the best of three."""
        a, b = self.matrix.to(getattr(torch, dtype))
        return {"seconds": min(seconds(torch.mm, a, b) for _ in range(3))}


def seconds(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def memory_status(name: str) -> int:
    """VmRSS (what this process holds now) or VmHWM (its peak), in bytes, mapped pages of files included (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def answer(contender: Contender, task: str, **arguments) -> dict:
    """Run a task; add its memory: the peak in all, and what it took beyond what was held before (`grown_bytes`)."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the earlier peak
    before, start = memory_status("VmRSS"), time.perf_counter()
    result = getattr(contender, task)(**arguments)
    result["whole_seconds"] = time.perf_counter() - start
    peak = memory_status("VmHWM")
    return {**result, "peak_bytes": peak, "grown_bytes": max(peak - before, 0)}


def main():
    # Libraries print to stdout; answers keep it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    specification = json.loads(sys.argv[1])
    torch.set_num_threads(specification["threads"])
    contender = globals()[specification.pop("class")](**specification)
    for line in sys.stdin:
        try:
            result = answer(contender, **json.loads(line))
        except ImportError as error:
            result = {"error": f"{error} (pip install {contender.package})"}
        except Exception as error:  # every library has errors of its own; the others go on
            result = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
