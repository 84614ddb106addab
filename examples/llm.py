"""vLLM's own ``LLM``, a different ablation for every request of one batch.

python examples/llm.py [MODEL]
"""

from __future__ import annotations

import sys

from cs_localize.serving import ablation_args, llm_options, model_shape

PROMPT = "hot -> cold\nbig -> small\nfast -> slow\nup ->"
ABLATIONS: tuple[list[str], ...] = ([], ["L0H0"], ["L0H0=0.5", "L1H2"], [])


def main(model: str) -> None:
    """Generates under every ablation and prints one line each."""
    options = llm_options(model)  # before vLLM is imported: it sets what vLLM reads of the environment

    from vllm import LLM, SamplingParams

    llm = LLM(**options, enforce_eager=True)
    shape = model_shape(llm)
    params = [
        SamplingParams(temperature=0, max_tokens=8, logprobs=0, extra_args=ablation_args(heads, shape))
        for heads in ABLATIONS
    ]
    for heads, output in zip(ABLATIONS, llm.generate([PROMPT] * len(params), params, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        print(f"{','.join(heads) or 'none':<16} {completion.cumulative_logprob:8.3f}  {completion.text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
