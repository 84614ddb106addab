"""Switching heads and neurons off in a transformers decoder, a different ablation for every row, and proof of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from cs_localize.errors import MeasurementError
from cs_localize.heads import Ablation, ModelShape
from cs_localize.measure.geometry import alone, check_contributions, check_counts, layer_of, single_heads

_PreHook = Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor] | None]


@dataclass
class _Site:
    """One projection whose input is scaled and shifted: ``o_proj`` for heads, ``down_proj`` for neurons.

    Attributes:
        parent: the module that holds it, of ``o_proj`` the layer's attention.
        scale: ``[rows, 1, width]``, or None for ones.
        shift: ``[rows, 1, width]``, added after scaling, or None for zeros.
        mean: ``[width]``, the mean input of ``o_proj``, once it is measured.
    """

    name: str
    layer: int
    module: torch.nn.Linear
    parent: torch.nn.Module
    width: int
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    calls: int = 0


class AblationHooks:
    """Forward pre-hooks on every ``o_proj`` and ``down_proj`` of a decoder.

    The input of ``o_proj`` is ``[rows, tokens, heads * head_dim]`` with the query heads side by side, also where they
    share KV heads, so scaling a slice of it scales exactly that query head. The input of ``down_proj`` is
    ``[rows, tokens, ffn]``, one entry a neuron.

    Attributes:
        forwards: forward passes proven so far.
        calls: hook calls proven so far.
    """

    def __init__(self, model: torch.nn.Module, shape: ModelShape) -> None:
        """Finds the projections, checks their geometry and attaches the hooks.

        Args:
            model: a decoder of transformers.
            shape: the geometry that ablations refer to.

        Raises:
            MeasurementError: if a layer lacks one of the projections, has it twice, or it has another width, or if its
                attention counts other heads.
        """
        self.forwards = 0
        self.calls = 0
        self._shape = shape
        self._heads = _sites(model, "o_proj", shape.layers, shape.heads * shape.head_dim)
        self._neurons = _sites(model, "down_proj", shape.layers, shape.ffn)
        for site in self._heads:
            _check_counts(site, shape)
        self._rows: int | None = None
        self._handles = [site.module.register_forward_pre_hook(self._hook(site)) for site in self._all()]

    def remove(self) -> None:
        """Detaches the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def check_contributions(self, forward: Callable[[], object]) -> None:
        """Checks that what single heads put through ``o_proj`` adds up to the output of their layer's attention.

        Args:
            forward: runs the model once, on one row of tokens.

        Raises:
            MeasurementError: if it does not in some layer.
        """
        inputs: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        handles = [
            site.module.register_forward_pre_hook(partial(_keep_input, inputs, site.name)) for site in self._heads
        ]
        handles += [
            site.parent.register_forward_hook(partial(_keep_output, outputs, site.name)) for site in self._heads
        ]
        try:
            forward()
        finally:
            for handle in handles:
                handle.remove()
        for site in self._heads:
            if site.name not in inputs:
                raise MeasurementError(f"{site.name} is not called as a module; this model cannot be ablated")
        ablations, heads = single_heads(self._shape), range(self._shape.heads)
        expected = [site.module(alone(inputs[site.name][0], self._shape, heads)) for site in self._heads]
        with self.applied(ablations):
            parts = [site.module(inputs[site.name].expand(len(ablations), -1, -1)) for site in self._heads]
        for site, have, want in zip(self._heads, parts, expected, strict=True):
            check_contributions(site.name.rpartition(".")[0], have, want, outputs[site.name][0])

    @contextmanager
    def applied(self, ablations: Sequence[Ablation]) -> Iterator[None]:
        """Scales heads and neurons in every forward pass inside the block; row ``i`` gets ``ablations[i]``.

        Raises:
            UsageError: if an ablation names a head or neuron the model lacks.
            MeasurementError: if another block is active, or means are wanted that were not measured.
        """
        if self._rows is not None:
            raise MeasurementError("ablations are already applied to this model; one block at a time")
        for ablation in ablations:
            ablation.check(self._shape)
        try:
            self._rows = len(ablations)
            for row, ablation in enumerate(ablations):
                self._set_row(row, ablation)
            yield
        finally:
            self._rows = None
            for site in self._all():
                site.scale = site.shift = None

    @contextmanager
    def scaled(self, factors: torch.Tensor) -> Iterator[None]:
        """Scales every head by a factor that gradients flow to, in every forward pass inside the block.

        Args:
            factors: ``[rows, layers, heads]``.

        Raises:
            MeasurementError: if another block is active.
        """
        with self.applied([Ablation()] * len(factors)):
            for site in self._heads:
                wide = factors[:, site.layer].repeat_interleave(self._shape.head_dim, dim=1)
                site.scale = wide[:, None].to(site.module.weight.dtype)
            yield

    def measure_means(self, batches: Iterable[tuple[torch.Tensor, Callable[[], object]]]) -> None:
        """Measures the mean input of every ``o_proj``; from then on heads can be replaced by their means.

        Args:
            batches: for each forward pass which of its token positions count, ``[rows, tokens]`` bool, and a call that
                runs it.
        """
        sums = [torch.zeros(site.width, dtype=torch.float64, device=site.module.weight.device) for site in self._heads]
        counted = 0
        for mask, forward in batches:
            handles = [
                site.module.register_forward_pre_hook(partial(_add_up, total, mask))
                for site, total in zip(self._heads, sums, strict=True)
            ]
            try:
                forward()
            finally:
                for handle in handles:
                    handle.remove()
            counted += int(mask.sum())
        for site, total in zip(self._heads, sums, strict=True):
            site.mean = (total / counted).to(site.module.weight.dtype)

    @contextmanager
    def proven(self, first_layer: int = 0) -> Iterator[None]:
        """Counts the hooks of one forward pass, which the block must consist of.

        Args:
            first_layer: the pass runs this layer and all after it, and none before.

        Raises:
            MeasurementError: if the hook of a layer did not run exactly once, so the pass may not have been ablated.
        """
        for site in self._all():
            site.calls = 0
        yield
        for site in self._all():
            expected = int(site.layer >= first_layer)
            if site.calls != expected:
                raise MeasurementError(
                    f"{site.name} was called {site.calls} times in one forward pass, expected {expected}; "
                    "this model does not run its projections as modules, so it cannot be ablated"
                )
            self.calls += site.calls
        self.forwards += 1

    def _all(self) -> list[_Site]:
        return [*self._heads, *self._neurons]

    def _set_row(self, row: int, ablation: Ablation) -> None:
        width = self._shape.head_dim
        for head, factor in ablation.heads:
            scale = self._scale_of(self._heads[head.layer])
            scale[row, :, head.head * width : (head.head + 1) * width] = factor
        for head in ablation.mean_heads:
            site, part = self._heads[head.layer], slice(head.head * width, (head.head + 1) * width)
            if site.mean is None:
                raise MeasurementError(f"{head} cannot be replaced by its mean, which was not measured")
            self._scale_of(site)[row, :, part] = 0.0
            if site.shift is None:
                site.shift = torch.zeros_like(self._scale_of(site))
            site.shift[row, :, part] = site.mean[part]
        for neuron, factor in ablation.neurons:
            self._scale_of(self._neurons[neuron.layer])[row, :, neuron.neuron] = factor

    def _scale_of(self, site: _Site) -> torch.Tensor:
        if site.scale is None:
            weight = site.module.weight
            site.scale = torch.ones(self._rows or 0, 1, site.width, dtype=weight.dtype, device=weight.device)
        return site.scale

    def _hook(self, site: _Site) -> _PreHook:
        def scale_input(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
            site.calls += 1
            if self._rows is None:
                return None
            if len(inputs) != 1 or inputs[0].dim() != 3 or inputs[0].shape[0] != self._rows:
                shapes = [tuple(value.shape) for value in inputs]
                raise MeasurementError(f"{site.name} got {shapes}, expected [{self._rows} rows, tokens, {site.width}]")
            if site.scale is None:
                return None
            scaled = inputs[0] * site.scale
            return (scaled if site.shift is None else scaled + site.shift,)

        return scale_input


def _add_up(total: torch.Tensor, mask: torch.Tensor, _module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
    """A pre-hook that adds to ``total`` the inputs at the positions of the mask."""
    total += inputs[0][mask].double().sum(0)


def _keep_input(
    kept: dict[str, torch.Tensor], name: str, _module: torch.nn.Module, inputs: tuple[torch.Tensor]
) -> None:
    kept[name] = inputs[0]


def _keep_output(
    kept: dict[str, torch.Tensor],
    name: str,
    _module: torch.nn.Module,
    _inputs: object,
    output: torch.Tensor | tuple[torch.Tensor, ...],
) -> None:
    kept[name] = output[0] if isinstance(output, tuple) else output


def _check_counts(site: _Site, shape: ModelShape) -> None:
    """Compares the counts of an ``o_proj``'s attention with the shape."""
    head_dim, group = (getattr(site.parent, name, None) for name in ("head_dim", "num_key_value_groups"))
    where = site.name.rpartition(".")[0]
    if not head_dim or not group:
        raise MeasurementError(
            f"{where} ({type(site.parent).__name__}) is not recognised: it does not say its head_dim and "
            "num_key_value_groups"
        )
    heads = site.width // head_dim
    check_counts(where, heads, heads // group, head_dim, shape)


def _sites(model: torch.nn.Module, name: str, layers: int, width: int) -> list[_Site]:
    """The projections of one kind in layer order, checked."""
    found: dict[int, _Site] = {}
    for path, module in model.named_modules():
        layer = layer_of(path)
        if layer is None or path.rpartition(".")[2] != name:
            continue
        if layer in found:
            raise MeasurementError(f"layer {layer} has two {name}: {found[layer].name} and {path}")
        in_features = getattr(module, "in_features", None)
        if not isinstance(module, torch.nn.Linear) or in_features != width:
            raise MeasurementError(f"{path} ({type(module).__name__}) takes {in_features} inputs, expected {width}")
        found[layer] = _Site(path, layer, module, model.get_submodule(path.rpartition(".")[0]), width)
    if sorted(found) != list(range(layers)):
        missing = sorted(set(range(layers)) - set(found))
        what = f"none in layers {missing}" if missing else f"it has {len(found)} layers instead of {layers}"
        raise MeasurementError(
            f"expected one {name} in each of {layers} decoder layers of {type(model).__name__}: {what}"
        )
    return [found[layer] for layer in range(layers)]
