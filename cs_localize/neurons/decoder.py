"""One decoder run, recorded, and many variants of one of its positions continued from it without approximation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch.utils.hooks import RemovableHandle

from cs_localize.errors import MeasurementError
from cs_localize.measure.hf import HFEngine

_KNOWN = "neurons can be attributed in decoders built like Llama, Mistral, Qwen2 and Qwen3"


@dataclass(frozen=True)
class Recording:
    """What one forward pass leaves behind.

    Attributes:
        keys: per layer ``[1, kv_heads, tokens, head_dim]``.
        values: likewise.
        residual: per layer ``[tokens, hidden]``, what the FFN's output is added to.
        hidden: per layer ``[tokens, ffn]``, the input of ``down_proj``.
        logits: ``[positions, vocabulary]`` at the positions asked for.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    residual: list[torch.Tensor]
    hidden: list[torch.Tensor]
    logits: torch.Tensor


class Decoder:
    """The parts of a Llama-like decoder that its neurons' effects pass through.

    Attributes:
        layers: number of decoder layers.
    """

    def __init__(self, engine: HFEngine) -> None:
        """Finds the parts.

        Raises:
            MeasurementError: if the model has other parts than Llama, Mistral, Qwen2 and Qwen3 have.
        """
        self._model: torch.nn.Module = engine.model
        self._device = engine.model.device
        self._config = engine.model.config.get_text_config()
        self._hooks = engine.hooks
        self.layers = engine.shape.layers
        self._layers = [_part(self._model, f"model.layers.{number}") for number in range(self.layers)]
        self._norms = [_part(layer, "post_attention_layernorm") for layer in self._layers]
        self._downs = [_part(layer, "mlp.down_proj") for layer in self._layers]
        self._rotary = _part(self._model, "model.rotary_emb")
        self._last_norm = _part(self._model, "model.norm")
        self._vocabulary = _part(self._model, "lm_head")

    @torch.no_grad()
    def record(self, ids: Sequence[int], first: int) -> Recording:
        """Runs the model once over a sequence, under the ablation that is applied, which must leave neurons alone.

        Args:
            ids: tokens.
            first: logits are kept from this position on.

        Raises:
            MeasurementError: if a layer's output is not its residual plus ``down_proj`` of its hidden vector, or a
                sliding window is shorter than the sequence.
        """
        self._check_window(len(ids))
        cache = transformers.DynamicCache()
        seen: dict[tuple[str, int], torch.Tensor] = {}
        handles = [handle for number in range(self.layers) for handle in self._watch(number, seen)]
        tokens = torch.tensor([list(ids)], device=self._device)
        try:
            with self._hooks.proven():
                kept = torch.arange(first, len(ids), device=tokens.device)
                logits = self._model(
                    input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=kept
                ).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        self._check_layers(seen)
        return Recording(
            keys=[entry[0] for entry in cache],
            values=[entry[1] for entry in cache],
            residual=[seen["residual", number] for number in range(self.layers)],
            hidden=[seen["hidden", number] for number in range(self.layers)],
            logits=logits,
        )

    def vary(self, recording: Recording, position: int, starts: range, variants: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the next token when one layer's hidden vector at one position is replaced.

        Variants of all starting layers advance together: those of layer ``l`` join behind its FFN, and every later
        layer runs once for all that have joined. They stand side by side as tokens of one row, each seeing the recorded
        keys and values before the position and its own, but not the other variants.

        Args:
            recording: the run to continue from.
            position: the position that is changed, counted from 0.
            starts: consecutive layers whose hidden vector is replaced, one layer at a time.
            variants: ``[starting layers, variants, ffn]``.

        Returns:
            ``[starting layers x variants, vocabulary]`` in float32, layer by layer.
        """
        cache = _Prefix(recording, position)
        rows: torch.Tensor | None = None
        with self._hooks.proven(first_layer=starts[0] + 1):
            for number in range(starts[0], self.layers):
                if rows is not None:
                    rows = self._run_layer(number, rows, position, cache)
                if number in starts:
                    # forward() and not a call: the hook of this layer belongs to those that have joined before.
                    change = self._downs[number].forward(variants[number - starts[0]])
                    joined = recording.residual[number][position] + change
                    rows = joined[None] if rows is None else torch.cat([rows, joined[None]], 1)
        logits: torch.Tensor = self._vocabulary(self._last_norm(rows))[0]
        return logits.float().log_softmax(-1)

    def _run_layer(self, number: int, rows: torch.Tensor, position: int, cache: transformers.Cache) -> torch.Tensor:
        count = rows.shape[1]
        blocked = torch.finfo(rows.dtype).min
        others = torch.full((count, count), blocked, dtype=rows.dtype, device=rows.device).fill_diagonal_(0.0)
        mask = torch.cat([rows.new_zeros(count, position), others], 1)[None, None]
        where = torch.full((1, count), position, device=rows.device)
        output: torch.Tensor = self._layers[number](
            rows,
            attention_mask=mask,
            position_ids=where,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=self._rotary(rows, where),
        )
        return output

    def _watch(self, number: int, seen: dict[tuple[str, int], torch.Tensor]) -> list[RemovableHandle]:
        """Hooks that note a layer's residual, hidden vector and output, of the only row."""

        def note(what: str, value: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            seen[what, number] = (value if isinstance(value, torch.Tensor) else value[0])[0]

        return [
            self._norms[number].register_forward_pre_hook(lambda _, inputs: note("residual", inputs)),
            self._downs[number].register_forward_pre_hook(lambda _, inputs: note("hidden", inputs)),
            self._layers[number].register_forward_hook(lambda _, __, output: note("output", output)),
        ]

    def _check_window(self, tokens: int) -> None:
        window = getattr(self._config, "sliding_window", None)
        kinds = getattr(self._config, "layer_types", None) or ["sliding_attention"]
        if window and "sliding_attention" in kinds and tokens > window:
            raise MeasurementError(f"an item of {tokens} tokens exceeds the model's sliding window of {window}")

    def _check_layers(self, seen: dict[tuple[str, int], torch.Tensor]) -> None:
        for number in range(self.layers):
            expected = seen["residual", number] + self._downs[number].forward(seen["hidden", number])
            output = seen["output", number]
            tolerance = 64 * torch.finfo(output.dtype).eps * float(output.abs().max())
            if not torch.allclose(expected, output, rtol=0.0, atol=tolerance):
                raise MeasurementError(
                    f"layer {number} of {type(self._model).__name__} is not its residual plus down_proj of the hidden "
                    f"vector; {_KNOWN}"
                )


class _Prefix(transformers.Cache):
    """Keys and values before a position; what a layer adds is returned with them but not kept."""

    def __init__(self, recording: Recording, position: int) -> None:
        super().__init__(layers=[])
        self._recording = recording
        self._position = position

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The prefix followed by the new keys and values."""
        keys = self._recording.keys[layer_idx][:, :, : self._position]
        values = self._recording.values[layer_idx][:, :, : self._position]
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


def _part(module: torch.nn.Module, path: str) -> torch.nn.Module:
    try:
        return module.get_submodule(path)
    except AttributeError:
        raise MeasurementError(f"{type(module).__name__} has no '{path}'; {_KNOWN}") from None
