"""The process of one vLLM engine: starts it, then works off requests until its parent is gone.

Run by ``engine.Engine``: ``python -m vllm_plugin.serving.child SETTINGS``.  Answers go to what was
standard output; everything else that is printed goes to the log.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from .kernels import Busy, summarise


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    requests = _requests()

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        began = time.perf_counter()
        engine = Server(settings)
        say({"ready": True, "seconds": time.perf_counter() - began, **engine.facts()})
        for request in requests:
            say(engine.serve(request))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"[:500]})
        os._exit(1)
    os._exit(0)  # engines may wait for each other at exit


def _requests() -> Iterator[dict[str, Any]]:
    """Requests from the parent; when it is gone, so is this process, whatever it is doing."""
    import queue

    waiting: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in sys.stdin.buffer:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(waiting.get())


class Server:
    """A vLLM engine in this process."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import torch
        from vllm import LLM

        from .checkpoint import seed_weights

        name_kernels()
        if settings.get("load_format") == "dummy":
            seed_weights(int(settings.get("seed", 0)))
        options = {name: value for name, value in settings.items() if name != "seed"}
        self._llm = LLM(skip_tokenizer_init=True, **options)
        self._cuda = torch.cuda.is_available()
        self._vocabulary = int(self._llm.model_config.get_vocab_size())

    def facts(self) -> dict[str, Any]:
        """What the report names: device, versions, and what vLLM made of the settings."""
        import torch
        import triton
        import vllm

        config = self._llm.llm_engine.vllm_config
        name = torch.cuda.get_device_name() if self._cuda else "cpu"
        return {
            "device": name,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "vllm": vllm.__version__,
            "fast_prefill": bool(config.cache_config.kv_sharing_fast_prefill),
            "block_size": int(config.cache_config.block_size or 0),
        }

    def serve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """``run`` or ``profile`` a workload, or ``record`` what layers return."""
        if request["do"] == "profile":
            return self._profile(request)
        if request["do"] == "record":
            from .record import record

            return record(self._llm, request)
        return self._run(request)

    def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, new = self._llm.llm_engine, int(request["new_tokens"])
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        draw = random.Random(f"{request['seed']}")
        prompts = [
            [draw.randrange(2, self._vocabulary) for _ in range(int(request["prompt_tokens"]))]
            for _ in range(int(request["sequences"]))
        ]
        self._wait()
        began = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add_request(f"{request['seed']} {index}", {"prompt_token_ids": prompt}, sampling)
        last: dict[str, float] = {}
        first: list[float] = []
        gaps: list[float] = []
        made = steps = 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            steps += 1
            for output in outputs:
                count = len(output.outputs[0].token_ids)
                if not count:
                    continue
                made += count
                if output.request_id in last:
                    gaps += [(now - last[output.request_id]) / count] * count
                else:
                    first.append(now - began)
                last[output.request_id] = now
        self._wait()
        seconds = time.perf_counter() - began
        if made != new * len(prompts):
            raise RuntimeError(f"{made} tokens came, wanted {new} of {len(prompts)} sequences")
        return {
            "seconds": seconds,
            "steps": steps,
            "prompt_tokens": sum(map(len, prompts)),
            "new_tokens": made,
            "first_token_s": quantiles(first),
            "between_tokens_s": quantiles(gaps),
        }

    def _profile(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if not self._cuda:
            return {"kernels": None}
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            result = self._run(request)
        spans = [
            Busy(event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if "CUDA" in str(event.device_type) and event.time_range.end > event.time_range.start
        ]
        return {**result, "kernels": summarise(spans)}

    def _wait(self) -> None:
        if self._cuda:
            import torch

            torch.cuda.synchronize()


def name_kernels() -> None:
    """Let profiles of this process tell our kernels apart: several are called ``_kernel``."""
    from kernel_templates import attention_prefill, qkv_norm_rope

    for module in (attention_prefill, qkv_norm_rope):
        name = module.__name__.rpartition(".")[2] + "_kernel"
        if getattr(module._kernel, "_repr", name) is None:
            module._kernel._repr = lambda _, name=name: name


def quantiles(values: list[float]) -> dict[str, float] | None:
    """Median and upper quantiles, None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return dict.fromkeys(("p50", "p95", "p99"), values[0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}


if __name__ == "__main__":
    main()
