from __future__ import annotations

import gc
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cs_localize.config import EngineConfig
from cs_localize.errors import MeasurementError, UsageError
from cs_localize.heads import Ablation, Head, ModelShape, Neuron
from cs_localize.measure.geometry import Share
from cs_localize.measure.vllm.table import InterventionTable, SlotPool, install
from tests.ci_scripts import ROOT

pytestmark = pytest.mark.vllm

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=3, ffn=5)
FACTORS = (0.0, 0.5, 2.0)

unit_factors = st.fixed_dictionaries(
    {},
    optional={
        **{f"{head}": st.sampled_from(FACTORS) for head in SHAPE.all_heads()},
        **{f"L{layer}N{n}": st.sampled_from(FACTORS) for layer in range(SHAPE.layers) for n in range(SHAPE.ffn)},
    },
)
ablations = unit_factors.map(lambda units: Ablation.decode(",".join(f"{unit}={f}" for unit, f in units.items())))
steps = st.lists(st.lists(st.tuples(ablations, st.integers(1, 4)), min_size=1, max_size=4), min_size=1, max_size=6)


def new_table(slots: int = 5, neuron_slots: int = 4, dtype: torch.dtype = torch.float32) -> InterventionTable:
    return InterventionTable(SHAPE, slots, neuron_slots, 64, dtype, torch.device("cpu"))


def table_with_means(slots: int = 5) -> Any:  # noqa: ANN401  # an InterventionTable whose means are not None
    return InterventionTable(SHAPE, slots, 4, 64, torch.float32, torch.device("cpu"), means=True)


def begin(table: InterventionTable, *requests: tuple[str, int]) -> None:
    table.begin_step([text for text, _ in requests], np.array([tokens for _, tokens in requests], dtype=np.int64))


def run_hooks(table: InterventionTable, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the hooks of every layer make of inputs of ones: ``[L, T, H*D]`` and ``[L, T, F]``."""
    heads = torch.ones(SHAPE.layers, rows, SHAPE.heads * SHAPE.head_dim)
    neurons = torch.ones(SHAPE.layers, rows, SHAPE.ffn)
    for layer in range(SHAPE.layers):
        table.scale_heads(heads[layer], layer)
        table.scale_neurons(neurons[layer], layer)
    return heads, neurons


def expected_factors(rows: list[Ablation]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by definition, entry by entry."""
    heads = torch.ones(SHAPE.layers, len(rows), SHAPE.heads * SHAPE.head_dim)
    neurons = torch.ones(SHAPE.layers, len(rows), SHAPE.ffn)
    for row, ablation in enumerate(rows):
        for head, factor in ablation.heads:
            for i in range(SHAPE.head_dim):
                heads[head.layer, row, head.head * SHAPE.head_dim + i] = factor
        for neuron, factor in ablation.neurons:
            neurons[neuron.layer, row, neuron.neuron] = factor
    return heads, neurons


def test_a_pool_gives_every_key_its_own_slot_and_the_empty_key_slot_zero() -> None:
    slot_of, fresh = SlotPool(4).assign(["a", "", "b", "a"])
    assert slot_of[""] == 0
    assert fresh == ["a", "b"]
    assert sorted(slot_of.values()) == [0, 1, 2]


def test_a_pool_keeps_what_it_holds_and_evicts_the_least_recently_used() -> None:
    pool = SlotPool(4)
    first, _ = pool.assign(["a", "b", "c"])
    pool.assign(["a"])
    second, fresh = pool.assign(["d"])
    assert fresh == ["d"]
    assert second["d"] == first["b"]
    third, fresh = pool.assign(["a", "c", "d"])
    assert fresh == []
    assert (third["a"], third["c"]) == (first["a"], first["c"])


def test_a_pool_that_overflows_says_so_and_stays_as_it_was() -> None:
    pool = SlotPool(3)
    before, _ = pool.assign(["a", "b"])
    with pytest.raises(MeasurementError, match="one step holds 3 different ablations, room is for 2"):
        pool.assign(["a", "c", "d"])
    after, fresh = pool.assign(["a", "b"])
    assert (after, fresh) == (before, [])


@pytest.mark.parametrize("text", ["L1H2", "L1N2"])
def test_a_slot_whose_writing_was_interrupted_is_written_when_it_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    table = new_table()
    with monkeypatch.context() as patch:
        patch.setattr("cs_localize.measure.vllm.table._copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin(table, (text, 2))
    begin(table, (text, 2))
    heads, neurons = run_hooks(table, 2)
    expected_heads, expected_neurons = expected_factors([Ablation.decode(text)] * 2)
    torch.testing.assert_close(heads, expected_heads)
    torch.testing.assert_close(neurons, expected_neurons)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), max_size=4), max_size=12))
def test_a_pool_never_evicts_a_key_of_the_current_step(keys_of_steps: list[list[str]]) -> None:
    pool = SlotPool(5)
    content = dict.fromkeys(range(5), "")
    for keys in keys_of_steps:
        slot_of, fresh = pool.assign(keys)
        for key in fresh:
            content[slot_of[key]] = key
        assert content[0] == ""
        assert all(content[slot_of[key]] == key for key in keys)


def test_means_are_taken_over_the_rows_of_the_steps_in_between_and_put_in_place_of_their_heads_alone() -> None:
    table = table_with_means()
    begin(table, ("", 2))
    run_hooks(table, 2)
    table.means.start()
    rows = torch.arange(5 * 12, dtype=torch.float32).reshape(5, 12)
    for first, last in ((0, 3), (3, 5)):
        begin(table, ("", last - first))
        for layer in range(SHAPE.layers):
            padded = torch.cat([rows[first:last] * (layer + 1), torch.full((2, 12), 1e6)])
            table.scale_heads(padded, layer)
    table.means.finish()
    begin(table, ("L1H2=mean,L1H0", 2), ("L1H2=0.5", 1), ("", 1))
    heads, _ = run_hooks(table, 6)
    expected = torch.ones(6, 12)
    expected[:2, :3] = 0
    expected[:2, 6:9] = 2 * rows.mean(0)[6:9]
    expected[2, 6:9] = 0.5
    torch.testing.assert_close(heads[1], expected)
    torch.testing.assert_close(heads[0], torch.ones(6, 12), rtol=0, atol=0)
    begin(table, ("L1H2=0.5", 2))
    heads, _ = run_hooks(table, 2)
    torch.testing.assert_close(heads[1], expected[[2, 2]])


def test_a_slot_that_replaced_a_head_by_its_mean_does_not_do_so_for_what_comes_after() -> None:
    table = table_with_means(slots=2)
    table.means.start()
    begin(table, ("", 1))
    run_hooks(table, 1)
    table.means.finish()
    for text, kept in (("L0H0=mean", 12), ("L0H0", 9), ("L0H1=mean", 12), ("", 12), ("L0H2=2", 15)):
        begin(table, (text, 1))
        heads, _ = run_hooks(table, 1)
        assert int(heads[0].sum()) == kept


def test_means_that_miss_a_row_in_a_layer_are_refused() -> None:
    table = table_with_means()
    table.means.start()
    begin(table, ("", 3))
    table.scale_heads(torch.ones(3, 12), 0)
    with pytest.raises(MeasurementError, match="over 3 token rows, and layer 1 saw 0"):
        table.means.finish()
    assert not table.means.measured


def test_means_of_no_row_are_refused() -> None:
    table = table_with_means()
    table.means.start()
    with pytest.raises(MeasurementError, match="over 0 token rows"):
        table.means.finish()


@pytest.mark.parametrize("means", [False, True])
def test_a_head_cannot_be_replaced_by_a_mean_that_was_not_measured(means: bool) -> None:
    table = table_with_means() if means else new_table()
    with pytest.raises(MeasurementError, match="'L0H0=mean' replaces heads by their means, which were not measured"):
        begin(table, ("L0H0=mean", 1))


@given(steps)
def test_every_row_is_scaled_as_its_own_ablation_says_in_every_step(
    requests_of_steps: list[list[tuple[Ablation, int]]],
) -> None:
    table = new_table()
    for requests in requests_of_steps:
        begin(table, *((ablation.encode(), tokens) for ablation, tokens in requests))
        rows = [ablation for ablation, tokens in requests for _ in range(tokens)]
        padding = [Ablation()] * 3
        heads, neurons = run_hooks(table, len(rows) + len(padding))
        expected_heads, expected_neurons = expected_factors(rows + padding)
        torch.testing.assert_close(heads, expected_heads, rtol=0, atol=0)
        torch.testing.assert_close(neurons, expected_neurons, rtol=0, atol=0)
    table.verify()


def test_nothing_of_a_longer_step_is_left_in_a_shorter_one() -> None:
    table = new_table()
    begin(table, ("L0H1,L1N2", 40))
    begin(table, ("", 2))
    assert table.head_slot.count_nonzero() == 0
    assert table.neuron_slot.count_nonzero() == 0


def test_tables_keep_their_addresses() -> None:
    table = new_table()
    tensors = (table.head_factors, table.neuron_factors, table.head_slot, table.neuron_slot, table.scaled_heads)
    addresses = [tensor.data_ptr() for tensor in tensors]
    for text in ("L0H1", "L1H2=0.5,L1N2", ""):
        begin(table, (text, 3))
        run_hooks(table, 3)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert tensors[0] is table.head_factors


def test_the_slot_of_the_empty_ablation_is_never_written() -> None:
    table = new_table(slots=3, neuron_slots=2)
    for head in range(4):
        begin(table, (f"L0H{head},L0N{head}", 1), ("", 1))
    assert bool((table.head_factors[:, 0] == 1).all())
    assert bool((table.neuron_factors[:, 0] == 1).all())


def test_more_ablations_in_a_step_than_slots_raise_and_leave_no_slot_unwritten() -> None:
    table = new_table(slots=3)
    with pytest.raises(MeasurementError, match="room is for 2"):
        begin(table, ("L0H0", 1), ("L0H1", 1), ("L0H2", 1))
    begin(table, ("L0H0", 1), ("L0H1", 1))
    heads, _ = run_hooks(table, 2)
    torch.testing.assert_close(heads, expected_factors([Ablation.decode("L0H0"), Ablation.decode("L0H1")])[0])


@pytest.mark.parametrize("text", ["L2H0", "L0H4", "L2N0", "L1N5"])
def test_a_unit_the_model_lacks_raises(text: str) -> None:
    with pytest.raises(UsageError, match="out of range"):
        begin(new_table(), (text, 1))


def test_a_step_longer_than_the_table_raises() -> None:
    with pytest.raises(RuntimeError):
        begin(new_table(), ("L0H0", 65))


def test_a_batch_longer_than_the_table_raises_instead_of_passing_unscaled() -> None:
    table = new_table()
    begin(table, ("L0H0", 64))
    with pytest.raises(RuntimeError):
        run_hooks(table, 65)


def test_verify_counts_ablated_rows_only() -> None:
    table = new_table()
    begin(table, ("L0H0", 3), ("", 5), ("L1N1", 2))
    run_hooks(table, 10)
    table.verify()
    assert (table.expected_heads, table.expected_neurons) == (3, 2)
    assert table.scaled_heads.tolist() == [3, 3]
    assert table.scaled_neurons.tolist() == [2, 2]


def test_verify_names_the_layer_whose_hook_did_not_run() -> None:
    table = new_table()
    begin(table, ("L0H0,L0N0", 3))
    for layer in range(SHAPE.layers):
        table.scale_neurons(torch.ones(3, SHAPE.ffn), layer)
    table.scale_heads(torch.ones(3, 12), 0)
    with pytest.raises(MeasurementError, match="o_proj of layer 1 scaled 0 token rows, expected 3"):
        table.verify()


@pytest.mark.parametrize("rows_of_passes", [[2], [3, 3]], ids=["too few rows", "twice"])
def test_verify_raises_when_hooks_scaled_other_rows_than_they_should(rows_of_passes: list[int]) -> None:
    table = new_table()
    begin(table, ("L0H0,L0N0", 3))
    for rows in rows_of_passes:
        run_hooks(table, rows)
    with pytest.raises(MeasurementError, match="layer 0"):
        table.verify()


def test_a_step_that_was_prepared_but_never_run_is_noticed() -> None:
    table = new_table()
    begin(table, ("L0H0", 3))
    begin(table, ("L0H0", 3))
    run_hooks(table, 3)
    with pytest.raises(MeasurementError, match="expected 6"):
        table.verify()


def test_a_neuron_whose_hook_did_not_run_is_noticed() -> None:
    table = new_table()
    begin(table, ("L1N4", 2))
    with pytest.raises(MeasurementError, match="down_proj of layer 0 scaled 0 token rows, expected 2"):
        table.verify()


def test_evidence_counts_the_most_different_ablations_that_shared_a_step() -> None:
    table = new_table()
    begin(table, ("L0H0", 1), ("L0H1", 1), ("L0H0,L0N1", 1), ("", 1))
    begin(table, ("L0H0", 1))
    assert (table.most_ablations_in_a_step, table.steps) == (4, 2)


def test_bfloat16_tables_zero_exactly() -> None:
    table = new_table(dtype=torch.bfloat16)
    begin(table, (Ablation.of([Head(0, 1)], [Neuron(0, 2)]).encode(), 2))
    heads = torch.randn(2, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    neurons = torch.randn(2, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    before = heads.clone(), neurons.clone()
    table.scale_heads(heads, 0)
    table.scale_neurons(neurons, 0)
    assert heads[:, 3:6].count_nonzero() == 0
    assert neurons[:, 2].count_nonzero() == 0
    kept = [i for i in range(12) if i not in (3, 4, 5)]
    torch.testing.assert_close(heads[:, kept], before[0][:, kept], rtol=0, atol=0)
    torch.testing.assert_close(neurons[:, [0, 1, 3, 4]], before[1][:, [0, 1, 3, 4]], rtol=0, atol=0)


def test_the_ops_scale_through_the_installed_table_and_can_be_traced() -> None:
    table = new_table()
    install(table)
    begin(table, ("L1H0,L1N0", 2))
    heads, neurons = torch.ones(2, 12), torch.ones(2, 5)
    torch.ops.cs_localize.scale_heads(heads, 1)
    torch.ops.cs_localize.scale_neurons(neurons, 1)
    assert heads[:, :3].count_nonzero() == 0
    assert neurons[:, 0].count_nonzero() == 0
    shapes_only = torch.empty(2, 12, device="meta")
    assert torch.ops.cs_localize.scale_heads(shapes_only, 1) is None


def test_a_rank_scales_the_heads_and_neurons_of_its_share_by_their_factors_of_the_whole_model() -> None:
    shape = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=3, ffn=6)
    text = "L0H1=mean,L0H2=0.5,L1H3,L0N2,L1N4=2"
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(2, 2, 12, generator=generator), torch.randn(2, 2, 6, generator=generator)

    def scaled(share: Share) -> list[torch.Tensor]:
        table: Any = InterventionTable(shape, 3, 2, 8, torch.float32, torch.device("cpu"), means=True, share=share)
        own = slice(share.heads.start * 3, share.heads.stop * 3), slice(share.neurons.start, share.neurons.stop)

        def step() -> list[torch.Tensor]:
            inputs = [x[:, :, part].clone() for x, part in zip(given, own, strict=True)]
            for layer in range(shape.layers):
                table.scale_heads(inputs[0][layer], layer)
                table.scale_neurons(inputs[1][layer], layer)
            return inputs

        table.means.start()
        begin(table, ("", 2))
        step()
        table.means.finish()
        begin(table, (text, 2))
        done = step()
        table.verify()
        return done

    whole = scaled(Share.of(shape))
    ranks = [scaled(Share.of(shape, rank, 2)) for rank in range(2)]
    for i, expected in enumerate(whole):
        torch.testing.assert_close(torch.cat([rank[i] for rank in ranks], -1), expected)
        assert not torch.allclose(expected, given[i])


def test_a_dimension_before_the_tokens_makes_no_difference() -> None:
    table = new_table()
    begin(table, ("L0H1,L0N2", 2), ("", 1))
    plain, before = torch.ones(3, 12), torch.ones(1, 3, 12)
    neurons, before_neurons = torch.ones(3, 5), torch.ones(1, 3, 5)
    table.scale_heads(plain, 0)
    table.scale_heads(before, 0)
    table.scale_neurons(neurons, 0)
    table.scale_neurons(before_neurons, 0)
    assert torch.equal(before[0], plain)
    assert torch.equal(before_neurons[0], neurons)
    assert int(table.scaled_heads[0]) == int(table.scaled_neurons[0]) == 4


def test_memory_stays_flat_over_five_thousand_different_ablations() -> None:
    table = new_table(slots=9, neuron_slots=8)
    factors = iter(range(1, 7001))

    def ask(count: int) -> int:
        for _ in range(count // 8):
            begin(table, *((f"L0H1={next(factors) / 7001},L1N3=0.5", 1) for _ in range(8)))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = ask(2000)
        grown = ask(5000) - before
    finally:
        tracemalloc.stop()
    # A single short string kept for each would be five times as much; the rest is Python's own to and fro.
    assert grown < 5000 * 10, f"{grown} bytes more after 5,000 ablations that were not seen before"


def documented_bytes() -> list[int]:
    """What docs/engine.md says that a table of Llama-3.1-8B takes, and its means."""
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    found = re.search(r"steps of 8,192 tokens: ([\d,]+) bytes, and ([\d,]+) for means", page)
    assert found
    return [int(number.replace(",", "")) for number in found.groups()]


def held_bytes(table: InterventionTable) -> list[int]:
    """What the tensors of a table take, and those of its means."""
    return [
        sum(tensor.nbytes for tensor in vars(part).values() if isinstance(tensor, torch.Tensor))
        for part in (table, table.means)
    ]


def test_a_small_table_takes_the_bytes_that_a_count_by_hand_gives() -> None:
    # 40 factors of heads and 50 of neurons, of 4 bytes; 128 slots of tokens and 4 counters, of 8.
    # 24 means, 24 sums, 40 flags and 64 weights of tokens, of 4 bytes; 2 counters, of 8.
    assert held_bytes(table_with_means()) == [1416, 624]


def test_a_table_takes_the_bytes_that_the_documentation_says() -> None:
    shape, defaults, most_tokens = ModelShape(32, 32, 8, 128, 14336), EngineConfig(), 8192
    slots, neuron_slots = defaults.max_num_seqs + 1, defaults.neuron_slots + 1  # the engine adds one for its canary
    table = InterventionTable(shape, slots, neuron_slots, most_tokens, torch.bfloat16, torch.device("meta"), means=True)
    assert held_bytes(table) == documented_bytes()
