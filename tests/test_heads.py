from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs_localize.errors import UsageError
from cs_localize.heads import Ablation, Head, ModelShape, Neuron

repeatable = settings(derandomize=True, deadline=None)

SHAPE = ModelShape(layers=3, heads=6, kv_heads=2, head_dim=16, ffn=40)

heads = st.builds(Head, st.integers(0, 99), st.integers(0, 99))
neurons = st.builds(Neuron, st.integers(0, 99), st.integers(0, 20000))
factors = st.floats(allow_nan=False, allow_infinity=False, width=32)


@st.composite
def ablations(draw: st.DrawFn) -> Ablation:
    """Any ablation, built through the text a user would type, in any order."""
    factored = draw(st.dictionaries(st.one_of(heads, neurons), factors, max_size=6))
    means = draw(st.sets(heads.filter(lambda head: head not in factored), max_size=3))
    written = [*(f"{unit}={factor!r}" for unit, factor in factored.items()), *(f"{head}=mean" for head in means)]
    entries = draw(st.permutations(written))
    return Ablation.decode(",".join(entries))


@repeatable
@given(heads)
def test_a_head_is_read_as_it_is_printed(head: Head) -> None:
    assert Head.parse(str(head)) == head
    assert Head.parse(f"  {head}\n") == head


@repeatable
@given(neurons)
def test_a_neuron_is_read_as_it_is_printed(neuron: Neuron) -> None:
    assert Neuron.parse(str(neuron)) == neuron


def test_heads_print_as_researchers_write_them() -> None:
    assert str(Head(16, 21)) == "L16H21"
    assert str(Neuron(3, 120)) == "L3N120"


@pytest.mark.parametrize("text", ["", "L1", "H2", "L1H", "LH2", "l1h2", "L-1H2", "L1H2x", "L1 H2", "16.21", "L1N2"])
def test_what_is_not_a_head_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="write heads as L<layer>H<head>, for example L16H21"):
        Head.parse(text)


@pytest.mark.parametrize("text", ["", "L1H2", "N3", "L1N-2"])
def test_what_is_not_a_neuron_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="write neurons as L<layer>N<neuron>, for example L3N120"):
        Neuron.parse(text)


def test_heads_sort_by_layer_before_head_and_as_numbers() -> None:
    assert sorted([Head(10, 0), Head(2, 11), Head(2, 3)]) == [Head(2, 3), Head(2, 11), Head(10, 0)]


@repeatable
@given(ablations())
def test_an_ablation_is_read_as_it_is_written(ablation: Ablation) -> None:
    again = Ablation.decode(ablation.encode())
    assert again == ablation
    assert again.encode() == ablation.encode()
    assert again.key == ablation.key


@repeatable
@given(ablations(), ablations())
def test_ablations_are_equal_exactly_when_their_text_and_key_are(one: Ablation, other: Ablation) -> None:
    assert (one == other) == (one.encode() == other.encode()) == (one.key == other.key)


@repeatable
@given(st.lists(heads, max_size=6), st.lists(neurons, max_size=6))
def test_order_and_repeats_leave_an_ablation_the_same(some_heads: list[Head], some_neurons: list[Neuron]) -> None:
    ablation = Ablation.of(some_heads, some_neurons)
    assert ablation == Ablation.of(some_heads[::-1] * 2, some_neurons[::-1] * 2)
    assert [head for head, _ in ablation.heads] == sorted(set(some_heads))
    assert ablation == Ablation.decode(",".join(f"{unit}" for unit in {*some_heads, *some_neurons}))


def test_a_factor_of_one_is_no_ablation() -> None:
    assert Ablation.of([Head(1, 2)], [Neuron(1, 2)], scale=1.0) == Ablation()
    assert Ablation.decode("L1H2=1,L1N2=1.0") == Ablation()
    assert Ablation.decode("L1H2=1,L3H4") == Ablation.of([Head(3, 4)])


def test_the_empty_ablation_is_the_baseline() -> None:
    assert Ablation().empty
    assert Ablation().encode() == ""
    assert str(Ablation()) == "none"
    assert Ablation.decode(" , ") == Ablation()
    assert not Ablation.of(neurons=[Neuron(0, 0)]).empty


def test_an_ablation_is_typed_with_factors_where_they_are_not_zero() -> None:
    ablation = Ablation.decode("L7H0=0.5, L4H2, L3N10=-2")
    assert ablation.heads == ((Head(4, 2), 0.0), (Head(7, 0), 0.5))
    assert ablation.neurons == ((Neuron(3, 10), -2.0),)
    assert ablation.encode() == "L4H2,L7H0=0.5,L3N10=-2.0"


def test_a_head_replaced_by_its_mean_is_typed_so_and_stands_among_the_others() -> None:
    ablation = Ablation.decode("L7H0=0.5,L4H2,L5H1=mean,L3N10")
    assert ablation.mean_heads == (Head(5, 1),)
    assert ablation.heads == ((Head(4, 2), 0.0), (Head(7, 0), 0.5))
    assert ablation.encode() == "L4H2,L5H1=mean,L7H0=0.5,L3N10"
    assert Ablation.decode("L5H1=mean") == Ablation.to_mean([Head(5, 1), Head(5, 1)])
    assert not Ablation.to_mean([Head(5, 1)]).empty


def test_keys_of_ablations_that_replace_nothing_are_what_they_always_were() -> None:
    # The ledger finds outcomes by them.
    assert Ablation().key == "e3b0c44298fc1c149afbf4c8996fb924"
    assert Ablation.decode("L4H2,L7H0=0.5,L3N10").key == "33face3aeb7f2edb30b81dbf1af91252"


def test_factors_that_differ_in_the_last_bit_have_different_keys() -> None:
    assert Ablation.decode("L1H1=0.3").key != Ablation.decode(f"L1H1={0.1 + 0.2!r}").key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("L1H2,L1H2", "L1H2 is given twice"),
        ("L1H2=0.5,L1H2", "L1H2 is given twice"),
        ("L1N2,L1N2=3", "L1N2 is given twice"),
        ("L1H2=mean,L1H2", "L1H2 is given twice"),
        ("L1H2=1,L1H2=mean", "L1H2 is given twice"),
        ("L1N2=mean", "a neuron can only be scaled"),
        ("L1H2=half", "the factor after '=' must be a number"),
        ("L1H2=nan", "the factor after '=' must be finite"),
        ("L1H2=inf", "the factor after '=' must be finite"),
        ("L1N2=-inf", "the factor after '=' must be finite"),
        ("L1H2=1e39", "the factor after '=' must be finite in float32"),
        ("L1X2", "'L1X2' is not a head"),
        ("L1H2;L3H4", "is not a head"),
    ],
)
def test_a_malformed_ablation_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        Ablation.decode(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ablation", "message"),
    [
        (Ablation.of([Head(1, 2)], scale=math.nan), "L1H2 cannot be scaled by nan"),
        (Ablation.of(neurons=[Neuron(1, 2)], scale=-1e39), r"L1N2 cannot be scaled by -1e\+39"),
        (Ablation(heads=((Head(1, 2), 0.0), (Head(1, 2), 0.5))), "an ablation has L1H2 twice"),
        (Ablation(heads=((Head(1, 2), 0.0),), mean_heads=(Head(1, 2),)), "an ablation has L1H2 twice"),
        (Ablation(neurons=((Neuron(1, 2), 0.0), (Neuron(1, 2), 0.0))), "an ablation has L1N2 twice"),
    ],
)
def test_an_ablation_that_no_text_could_say_is_refused(ablation: Ablation, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ablation.check(ModelShape(layers=2, heads=4, kv_heads=2, head_dim=3, ffn=5))


def test_a_factor_of_numpy_is_written_as_any_other() -> None:
    ablation = Ablation(heads=((Head(1, 2), np.float64(0.5)),))
    assert ablation.encode() == "L1H2=0.5"
    assert ablation.key == Ablation.decode("L1H2=0.5").key


def test_keys_are_the_same_in_another_process_with_another_hash_seed() -> None:
    code = "from cs_localize.heads import Ablation; print(Ablation.decode('L4H2,L7H0=0.5,L3N10').key)"
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {Ablation.decode("L3N10,L7H0=.5,L4H2").key}
    assert len(keys.pop()) == 32


def test_arrays_over_heads_go_layer_by_layer() -> None:
    assert SHAPE.n_heads == 18
    assert SHAPE.n_neurons == 120
    assert [SHAPE.index(head) for head in SHAPE.all_heads()] == list(range(18))
    assert SHAPE.index(Head(1, 0)) == 6
    assert SHAPE.head(17) == Head(2, 5)


def test_query_heads_of_a_kv_head_are_neighbours() -> None:
    assert SHAPE.kv_group(Head(1, 4)) == (Head(1, 3), Head(1, 4), Head(1, 5))
    groups = {SHAPE.kv_group(head) for head in SHAPE.all_heads()}
    assert len(groups) == SHAPE.layers * SHAPE.kv_heads
    assert sorted(head for group in groups for head in group) == list(SHAPE.all_heads())


@pytest.mark.parametrize("head", [Head(3, 0), Head(0, 6), Head(-1, 0), Head(0, -1)])
def test_a_head_outside_the_model_is_refused_with_the_range(head: Head) -> None:
    message = f"{head} is out of range: this model has layers 0..2 and heads 0..5"
    for check in (
        lambda: SHAPE.check_head(head),
        lambda: SHAPE.index(head),
        lambda: SHAPE.kv_group(head),
        lambda: Ablation.of([head]).check(SHAPE),
        lambda: Ablation.to_mean([head]).check(SHAPE),
    ):
        with pytest.raises(UsageError, match=message):
            check()


@pytest.mark.parametrize("neuron", [Neuron(3, 0), Neuron(0, 40), Neuron(-1, 0), Neuron(0, -1)])
def test_a_neuron_outside_the_model_is_refused_with_the_range(neuron: Neuron) -> None:
    message = f"{neuron} is out of range: this model has layers 0..2 and neurons 0..39"
    with pytest.raises(UsageError, match=message):
        SHAPE.check_neuron(neuron)
    with pytest.raises(UsageError, match=message):
        Ablation.of(neurons=[neuron]).check(SHAPE)


@pytest.mark.parametrize("index", [-1, 18])
def test_an_index_outside_the_model_is_refused(index: int) -> None:
    with pytest.raises(UsageError, match=f"head index {index} is outside 0..17"):
        SHAPE.head(index)


def test_a_model_needs_one_of_everything_and_even_groups() -> None:
    with pytest.raises(UsageError, match="at least one of everything"):
        ModelShape(layers=0, heads=6, kv_heads=2, head_dim=16, ffn=40)
    with pytest.raises(UsageError, match="6 query heads cannot share 4 KV heads evenly"):
        ModelShape(layers=3, heads=6, kv_heads=4, head_dim=16, ffn=40)
