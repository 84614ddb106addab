"""What the test of vLLM's own ``LLM`` runs in a process of its own: the example, then an engine that is broken."""

from __future__ import annotations

import sys
from typing import Any

from cs_localize.errors import MeasurementError
from cs_localize.serving import ablation_args, llm_options, model_shape
from examples import llm as example


def main(model: str) -> None:
    """Prints the example's lines and, last, what an ``LLM`` raises whose hook was lost."""
    example.main(model)

    from vllm import LLM, SamplingParams

    llm: Any = LLM(**llm_options(model), enforce_eager=True)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.get_model().get_submodule("model.layers.1.self_attn.o_proj")._forward_pre_hooks.clear()
    params = SamplingParams(max_tokens=1, extra_args=ablation_args(["L0H0"], model_shape(llm)))
    try:
        llm.generate(["abc"], params, use_tqdm=False)
    except MeasurementError as error:
        print(error)


if __name__ == "__main__":
    main(sys.argv[1])
