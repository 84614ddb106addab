"""Where the table sits inside vLLM: a worker class of our own, named by its dotted path. Nothing of vLLM is patched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.platforms import current_platform

from cs_localize.errors import MeasurementError
from cs_localize.heads import ModelShape
from cs_localize.measure.geometry import Share, alone, check_contributions, check_counts, layer_of, single_heads
from cs_localize.measure.vllm import table as tables
from cs_localize.measure.vllm.gold import answer_rows, gold_of
from cs_localize.measure.vllm.options import read_options
from cs_localize.measure.vllm.start import keep_freed_memory, told_by_worker

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker

_HOOKED = {"o_proj": "scale_heads", "down_proj": "scale_neurons"}


class _RunnerMixin:
    """Tells the table which request owns which token of the step, and computes the rows that predict scored answers.

    Placed before vLLM's V1 runner in the class order.
    """

    num_prompt_logprobs: dict[str, int]

    def _prepare_inputs(self, scheduler_output: object, num_scheduled_tokens: NDArray[np.int32]) -> object:
        # Here the batch is in its final order, and num_scheduled_tokens runs parallel to it.
        with told_by_worker():
            ablations = [self._ablation_of(req_id) for req_id in self.input_batch.req_ids]  # type: ignore[attr-defined]
            tables.active().begin_step(ablations, num_scheduled_tokens.astype(np.int64))
        return super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]

    def execute_model(self, *args: object, **options: object) -> object:
        output = super().execute_model(*args, **options)  # type: ignore[misc]
        if self.vllm_config.additional_config["knockout_verified"]:  # type: ignore[attr-defined]
            # vLLM heeds the errors of one rank only and answers with what it has; a rank that ends, it does heed.
            with told_by_worker():
                tables.active().verify()
        return output

    def _get_prompt_logprobs_dict(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, object]:
        # What vLLM would compute for a whole prompt; of requests that score an answer, just the answer's rows.
        asked = self.num_prompt_logprobs
        golds = {req_id: gold for req_id in asked if (gold := gold_of(self.requests[req_id].sampling_params))}  # type: ignore[attr-defined]
        complete = answer_rows(self, golds, hidden_states, num_scheduled_tokens)
        self.num_prompt_logprobs = {req_id: count for req_id, count in asked.items() if req_id not in golds}
        others: dict[str, object] = super()._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)  # type: ignore[misc]
        self.num_prompt_logprobs |= {req_id: asked[req_id] for req_id in golds if req_id not in complete}
        return others | complete

    def _ablation_of(self, req_id: str) -> str:
        params = self.requests[req_id].sampling_params  # type: ignore[attr-defined]
        text = (params.extra_args or {}).get("ablation") if params is not None else None
        if not isinstance(text, str):
            raise MeasurementError(f"request {req_id} names no ablation; send extra_args={{'ablation': ''}} for none")
        return text


class KnockoutWorker(_Worker):
    """A vLLM worker that scales heads and neurons as each request's ``extra_args['ablation']`` says."""

    @told_by_worker()
    def init_device(self) -> None:
        """Refuses what has not been proven, then lets vLLM build its runner."""
        if self.use_v2_model_runner:
            raise MeasurementError("vLLM's V2 model runner is not supported; set VLLM_USE_V2_MODEL_RUNNER=0")
        if self.parallel_config.world_size != self.parallel_config.tensor_parallel_size:
            raise MeasurementError("an engine may be split by tensor parallelism only; set pipeline_parallel_size to 1")
        if self.vllm_config.speculative_config is not None:
            raise MeasurementError("speculative decoding is not supported: a draft model is not ablated")
        if self.vllm_config.kv_transfer_config is not None:
            raise MeasurementError("keys and values from elsewhere are not supported: they may be another ablation's")
        if self.parallel_config.use_ubatching:
            raise MeasurementError("batches that are split in two are not supported; leave --enable-dbo out")
        self._options = read_options(self.vllm_config.additional_config, bool(self.cache_config.enable_prefix_caching))
        if current_platform.is_cpu():
            keep_freed_memory()
        super().init_device()
        if self.parallel_config.world_size_across_dp == 1:
            _remove_meeting_point(self.distributed_init_method)
        runner = self.model_runner
        if not hasattr(runner, "_prepare_inputs") or not hasattr(runner, "input_batch"):
            raise MeasurementError(f"vLLM's runner {type(runner).__name__} is not the V1 runner this engine knows")
        runner.__class__ = type("KnockoutRunner", (_RunnerMixin, type(runner)), {})

    @told_by_worker()
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Loads the model and hooks its projections, before vLLM profiles and compiles it."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        config, dtype = self._options, self.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        shape = ModelShape(**config["knockout_shape"])
        share = Share.of(shape, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        model = self.model_runner.get_model()
        architecture = type(model).__name__
        projections = hook_projections(model, shape, architecture, share)
        attention = self.compilation_config.static_forward_context
        check_attention(attention, shape, architecture, get_tensor_model_parallel_world_size())
        make = partial(
            tables.InterventionTable, shape, dtype=dtype, device=next(model.parameters()).device, share=share
        )
        check_projections(projections, shape, make)
        table = make(
            slots=self.scheduler_config.max_num_seqs + 1,
            neuron_slots=config["knockout_neuron_slots"] or self.scheduler_config.max_num_seqs,
            max_tokens=self.scheduler_config.max_num_batched_tokens,
            means=config["knockout_means"],
        )
        tables.install(table)

    def architecture(self) -> str:
        """The class of the model."""
        return type(self.model_runner.get_model()).__name__

    def measure_means(self, measuring: bool) -> None:
        """Begins and ends the measuring of head means: every token row in between counts.

        Raises:
            MeasurementError: if the engine was not loaded for means, or a hook missed token rows.
        """
        means = tables.active().means
        if means is None:
            raise MeasurementError("this engine was loaded without prompts to measure the means of heads on")
        if measuring:
            means.start()
        else:
            means.finish()

    def knockout_evidence(self) -> dict[str, float]:
        """Counters since start-up, after checking that every hook did all of its work.

        Raises:
            MeasurementError: if a hook did not.
        """
        table = tables.active()
        table.verify()
        return {
            "steps": table.steps,
            "ablated_token_rows": table.expected_heads,
            "neuron_ablated_token_rows": table.expected_neurons,
            "most_ablations_in_a_step": table.most_ablations_in_a_step,
        }


def hook_projections(
    model: torch.nn.Module, shape: ModelShape, architecture: str, share: Share | None = None
) -> list[torch.nn.Module]:
    """Puts a pre-hook on every layer's ``o_proj`` and ``down_proj``.

    Returns:
        Every layer's ``o_proj``.

    Raises:
        MeasurementError: unless every layer has exactly one of each, of the width the shape says.
    """
    share = share or Share.of(shape)
    widths = {"o_proj": shape.heads * shape.head_dim, "down_proj": shape.ffn}
    shares = {"o_proj": len(share.heads) * shape.head_dim, "down_proj": len(share.neurons)}
    found: dict[str, dict[int, torch.nn.Module]] = {name: {} for name in widths}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        index = layer_of(path)
        if name not in widths or index is None:
            continue
        width = getattr(module, "input_size", None)
        if width != widths[name] or index in found[name] or index >= shape.layers:
            raise MeasurementError(
                f"{architecture} is not recognised: {path} has input width {width}; expected one {name} of width "
                f"{widths[name]} in each of {shape.layers} layers"
            )
        held = getattr(module, "input_size_per_partition", width)
        if held != shares[name]:
            raise MeasurementError(
                f"{architecture} is not recognised: a rank holds {held} of the {width} inputs of {path}, expected "
                f"{shares[name]}"
            )
        found[name][index] = module
        module.register_forward_pre_hook(partial(_pre_hook, _HOOKED[name], index))
    for name, layers in found.items():
        if len(layers) != shape.layers:
            raise MeasurementError(
                f"{architecture} is not recognised: {len(layers)} of {shape.layers} layers have a module named {name}"
            )
    return [found["o_proj"][layer] for layer in range(shape.layers)]


def check_attention(attention: Mapping[str, object], shape: ModelShape, architecture: str, ranks: int = 1) -> None:
    """Compares the counts of vLLM's own attention layers with the shape.

    Args:
        attention: vLLM's layers that hold keys and values, by name.
        shape: the model's geometry.
        architecture: for the message.
        ranks: of tensor parallelism; each counts its own heads, and KV heads that are too few are repeated.

    Raises:
        MeasurementError: unless there is one in every layer, with the counts that the shape says.
    """
    layers: set[int] = set()
    for name, module in attention.items():
        heads, kv_heads, head_dim = (int(getattr(module, n, 0)) for n in ("num_heads", "num_kv_heads", "head_size"))
        layer = layer_of(name)
        if layer is None or layer in layers or not heads * kv_heads * head_dim:
            raise MeasurementError(f"{architecture} is not recognised: {name} is a {type(module).__name__}")
        layers.add(layer)
        told = shape.kv_heads if kv_heads == max(1, shape.kv_heads // ranks) else kv_heads * ranks
        check_counts(f"{architecture}: {name}", heads * ranks, told, head_dim, shape)
    if layers != set(range(shape.layers)):
        raise MeasurementError(
            f"{architecture} is not recognised: {len(layers)} of {shape.layers} layers have an attention of vLLM's"
        )


def check_projections(
    projections: Sequence[torch.nn.Module], shape: ModelShape, make: Callable[..., tables.InterventionTable]
) -> None:
    """Checks the hooks on the model's own weights, with a table that ends with the check.

    Args:
        projections: every layer's ``o_proj``, hooked.
        shape: the model's geometry.
        make: makes a table, given its slots, neuron slots and most tokens.

    Raises:
        MeasurementError: if the hook does not act, or heads do not act alone and add up in a layer.
    """
    ablations = [ablation.encode() for ablation in single_heads(shape)]
    count = len(ablations)
    table = make(slots=count + 1, neuron_slots=1, max_tokens=count)
    tables.install(table)
    with torch.no_grad():
        for layer, projection in enumerate(projections):
            x = _probe(len(table.share.heads) * shape.head_dim, table.head_factors)
            table.begin_step([""] * count, np.ones(count, dtype=np.int64))
            expected = _projected(projection, alone(x, shape, table.share.heads).squeeze(1))
            whole = _projected(projection, x.clone())
            table.begin_step(ablations, np.ones(count, dtype=np.int64))
            parts = _projected(projection, x.repeat(count, 1))
            check_contributions(f"layer {layer}", parts, expected, whole[0])


def _remove_meeting_point(init_method: str) -> None:
    """Removes the file in which ranks find each other: a single one has met itself, and would leave it if killed."""
    if init_method.startswith("file://"):
        Path(init_method.removeprefix("file://")).unlink(missing_ok=True)


def _probe(width: int, like: torch.Tensor) -> torch.Tensor:
    """One row in which no entry equals another of its neighbourhood; nothing random, so that all ranks agree."""
    return torch.arange(1, width + 1, device=like.device).mul(0.7).sin().to(like.dtype).unsqueeze(0)


def _projected(projection: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The output of one of vLLM's linear layers, some of which return the bias beside it."""
    output: torch.Tensor | tuple[torch.Tensor, ...] = projection(x)
    return output[0] if isinstance(output, tuple) else output


def _pre_hook(op: str, layer: int, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    getattr(torch.ops.cs_localize, op)(args[0], layer)
