from __future__ import annotations

import ast
from collections import Counter
from itertools import combinations

import pytest

from cs_localize.tasks import Question, Task, get_task, task_names

SIZES = {
    "antonyms": 120,
    "past_tense": 150,
    "plurals": 150,
    "capitals": 120,
    "counting": 100,
    "addition": 93,
    "copying": 150,
    "superlatives": 100,
    "gender": 90,
    "categories": 140,
    "colours": 130,
    "sentiment": 90,
    "translation": 120,
    "successors": 80,
    "uppercase": 150,
    "first_letter": 150,
    "multiplication": 93,
    "comparison": 82,
    "code": 100,
    "rhyming": 100,
}
WORD_TASKS = (
    "antonyms",
    "past_tense",
    "plurals",
    "capitals",
    "copying",
    "superlatives",
    "gender",
    "categories",
    "colours",
)


def answers(name: str) -> dict[str, str]:
    task = get_task(name)
    return {question.text: question.answer for question in (*task.shots, *task.questions)}


def everything(task: Task) -> tuple[Question, ...]:
    return (*task.shots, *task.questions)


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_the_suite_is_as_large_as_promised(name: str, size: int) -> None:
    assert len(get_task(name).questions) >= size
    assert len(get_task(name).shots) == 4


@pytest.mark.parametrize("name", task_names())
def test_every_prompt_ends_without_white_space_and_every_answer_starts_with_one_space(name: str) -> None:
    task = get_task(name)
    for item in map(task.item, task.questions):
        assert item.prompt == item.prompt.rstrip()
        assert item.prompt.startswith(task.prefix)
        assert "\n" not in item.prompt[len(task.prefix) :]
        assert item.answer.startswith(" ")
        assert item.answer[1:] == item.answer.strip() != ""


@pytest.mark.parametrize("name", task_names())
def test_no_question_is_asked_twice(name: str) -> None:
    questions = everything(get_task(name))
    assert len({question.id for question in questions}) == len(questions)
    assert len({question.text for question in questions}) == len(questions)


@pytest.mark.parametrize("name", WORD_TASKS)
def test_words_are_plain_text_of_single_spaced_words(name: str) -> None:
    for question in everything(get_task(name)):
        for text in (question.text, question.answer):
            assert text.isascii()
            assert text == " ".join(text.split())
            assert all(part[0].isalpha() for part in text.split())


def test_antonyms_that_share_a_word_share_a_family() -> None:
    for one, other in combinations(everything(get_task("antonyms")), 2):
        if {one.text, one.answer} & {other.text, other.answer}:
            assert one.family == other.family, (one, other)


def test_antonyms_are_asked_in_both_directions_and_agree() -> None:
    opposite = {question.text: question.answer for question in get_task("antonyms").questions}
    both = [word for word, other in opposite.items() if opposite.get(other) == word]
    assert len(both) >= 120
    assert all(word != other for word, other in opposite.items())


@pytest.mark.parametrize("name", ["past_tense", "plurals"])
def test_inflections_of_one_lemma_share_a_family(name: str) -> None:
    compounds = {"become": "come", "forgive": "give", "understand": "stand", "return": "turn", "discover": "cover"}
    compounds |= {"woman": "man"}
    family = {question.text: question.family for question in everything(get_task(name))}
    forms = {question.text: {question.text, question.answer} for question in everything(get_task(name))}
    for text, lemma in compounds.items():
        if text in family:
            assert family[text] == family[lemma] == lemma
    for one, other in combinations(forms, 2):
        if forms[one] & forms[other]:
            assert family[one] == family[other]


def test_a_word_hidden_in_another_by_a_prefix_is_a_family_the_test_above_names() -> None:
    prefixes = ("be", "for", "under", "re", "dis", "un", "over", "mis", "out", "with", "wo")
    for name in ("past_tense", "plurals"):
        family = {question.text: question.family for question in everything(get_task(name))}
        for text in family:
            for prefix in prefixes:
                rest = text.removeprefix(prefix)
                if rest != text and rest in family:
                    assert family[text] == family[rest], text


def test_every_country_and_every_capital_occurs_once() -> None:
    questions = everything(get_task("capitals"))
    assert len({question.answer for question in questions}) == len(questions)
    assert not {question.answer for question in questions} & {question.text for question in questions}


def test_sums_are_right_whole_and_commuted_ones_share_a_family() -> None:
    task = get_task("addition")
    family: dict[tuple[int, int], str] = {}
    for question in everything(task):
        a, b = (int(part) for part in question.text.split(" + "))
        assert int(question.answer) == a + b
        family[a, b] = question.family
    shown = {(int(b), int(a)) for a, b in (shot.text.split(" + ") for shot in task.shots)}
    assert set(family) | shown == {(a, b) for a in range(10) for b in range(10)}
    assert all(family[a, b] == family.get((b, a), family[a, b]) for a, b in family)
    assert len(set(family.values())) == 55


def test_counting_goes_on_by_one_and_repeats_no_step_of_its_shots() -> None:
    task = get_task("counting")
    runs = {question.id: [*map(int, question.text.split()), int(question.answer)] for question in everything(task)}
    assert all(run == [run[0], run[0] + 1, run[0] + 2] for run in runs.values())
    shown = {step for shot in task.shots for step in zip(runs[shot.id], runs[shot.id][1:], strict=False)}
    for question in task.questions:
        assert not shown & set(zip(runs[question.id], runs[question.id][1:], strict=False))


def test_copying_answers_with_the_question_in_the_format_of_the_other_word_tasks() -> None:
    task = get_task("copying")
    assert all(question.answer == question.text for question in everything(task))
    assert task.template == get_task("antonyms").template == get_task("plurals").template


def test_products_are_right_whole_and_commuted_ones_share_a_family() -> None:
    task = get_task("multiplication")
    family: dict[tuple[int, int], str] = {}
    for question in task.questions:
        a, b = (int(part) for part in question.text.split(" * "))
        assert int(question.answer) == a * b
        family[a, b] = question.family
    shown = {(int(a), int(b)) for a, b in (shot.text.split(" * ") for shot in task.shots)}
    assert set(family) | shown | {(b, a) for a, b in shown} == {(a, b) for a in range(10) for b in range(10)}
    assert all(family[a, b] == family[b, a] for a, b in family)


def test_comparisons_are_right_and_either_order_is_asked_in_one_family() -> None:
    family: dict[tuple[int, int], str] = {}
    for question in get_task("comparison").questions:
        a, b = (int(part) for part in question.text.split(" or "))
        assert int(question.answer) == max(a, b)
        family[a, b] = question.family
    assert all(family[a, b] == family[b, a] and a != b for a, b in family)
    first = sum(question.text.startswith(f"{question.answer} ") for question in get_task("comparison").questions)
    assert 2 * first == len(family), "as often the first as the second"


def test_the_shots_of_a_comparison_answer_with_either_place_alike() -> None:
    shots = get_task("comparison").shots
    assert sum(shot.text.startswith(f"{shot.answer} ") for shot in shots) == len(shots) / 2


def test_the_other_gender_is_asked_in_both_directions_and_compounds_share_the_family_of_their_stem() -> None:
    questions = get_task("gender").questions
    other = {question.text: question.answer for question in questions}
    family = {question.text: question.family for question in questions}
    assert all(other[answer] == text for text, answer in other.items())
    assert all(family[text] == family[answer] for text, answer in other.items())
    for stem in ("father", "lord", "man"):
        assert {family[text] for text in family if text.endswith((stem, "mother" if stem == "father" else stem))} == {
            stem
        }


def test_superlatives_obey_the_rules_of_spelling() -> None:
    irregular = {"good": "best", "bad": "worst", "far": "farthest", "little": "least", "many": "most"}
    for word, superlative in answers("superlatives").items():
        if word not in irregular:
            regular = {word + "est", word + "st", word[:-1] + "iest", word + word[-1] + "est"}
            assert superlative in regular, word
            assert superlative.endswith("iest") == word.endswith("y"), word
            assert word.endswith("e") == (superlative == word + "st"), word
        else:
            assert superlative == irregular[word]


def test_praise_and_complaint_of_one_subject_share_a_family_and_are_as_many() -> None:
    sides: dict[str, list[str]] = {}
    for question in get_task("sentiment").questions:
        sides.setdefault(question.family, []).append(question.answer)
    assert all(sorted(side) == ["negative", "positive"] for side in sides.values())


def test_things_fall_into_the_kinds_and_colours_that_the_descriptions_count() -> None:
    assert len({question.answer for question in get_task("categories").questions}) == 16
    assert len({question.answer for question in get_task("colours").questions}) == 11
    for name in ("categories", "colours"):
        counts = Counter(question.answer for question in get_task(name).questions)
        assert counts.most_common(1)[0][1] < 0.2 * counts.total(), "a model that always says the same is mostly wrong"


def test_successors_go_on_and_ordinals_share_the_family_of_their_number() -> None:
    following = {question.text: question.answer for question in get_task("successors").questions}
    family = {question.text: question.family for question in get_task("successors").questions}
    assert following["Sunday"] == "Monday"
    assert following["December"] == "January"
    assert all(ord(following[letter]) == ord(letter) + 1 for letter in following if len(letter) == 1)
    assert family["fifth"] == family["five"]
    shown = {word for shot in get_task("successors").shots for word in (shot.text, shot.family)} | {"three"}
    assert not shown & (set(following) | set(family.values()))


def test_capital_letters_and_first_letters_are_of_the_words_of_the_copying_task() -> None:
    words = [question.text for question in everything(get_task("copying"))]
    for name, answer in (("uppercase", str.upper), ("first_letter", lambda word: word[0])):
        assert {question.text: question.answer for question in everything(get_task(name))} == {
            word: answer(word) for word in words
        }


def test_one_line_functions_parse_and_use_their_parameters() -> None:
    for question in everything(get_task("code")):
        (function,) = ast.parse(f"def {question.text}: return {question.answer}").body
        assert isinstance(function, ast.FunctionDef)
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        assert {parameter.arg for parameter in function.args.args} <= used
        assert question.family in {function.name, question.text}


def test_french_words_share_neither_text_nor_answer() -> None:
    questions = everything(get_task("translation"))
    assert len({question.answer for question in questions}) == len(questions)
    assert not any(question.text == question.answer for question in questions)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (
            "antonyms",
            {"good": "bad", "day": "night", "left": "right", "first": "last", "empty": "full", "above": "below"},
        ),
        ("past_tense", {"go": "went", "teach": "taught", "swim": "swam", "stop": "stopped", "carry": "carried"}),
        ("past_tense", {"freeze": "froze", "hide": "hid", "bite": "bit", "eat": "ate", "pay": "paid", "love": "loved"}),
        ("plurals", {"mouse": "mice", "wolf": "wolves", "hero": "heroes", "monkey": "monkeys", "lady": "ladies"}),
        ("plurals", {"ox": "oxen", "tax": "taxes", "half": "halves", "foot": "feet", "dog": "dogs"}),
        ("capitals", {"Australia": "Canberra", "Turkey": "Ankara", "Canada": "Ottawa", "Nigeria": "Abuja"}),
        ("capitals", {"Switzerland": "Bern", "Malaysia": "Kuala Lumpur", "New Zealand": "Wellington", "Peru": "Lima"}),
        ("addition", {"7 + 9": "16", "0 + 0": "0", "9 + 9": "18"}),
        ("counting", {"98 99": "100", "19 20": "21", "1 2": "3"}),
        (
            "superlatives",
            {"hot": "hottest", "easy": "easiest", "large": "largest", "bad": "worst", "quiet": "quietest"},
        ),
        ("gender", {"uncle": "aunt", "wife": "husband", "hen": "rooster", "grandmother": "grandfather"}),
        ("categories", {"eagle": "bird", "pear": "fruit", "hammer": "tool", "Rome": "city", "India": "country"}),
        ("colours", {"grass": "green", "snow": "white", "coal": "black", "carrot": "orange", "sky": "blue"}),
        ("translation", {"soleil": "sun", "lundi": "Monday", "école": "school", "mauvais": "bad"}),
        ("successors", {"Monday": "Tuesday", "nine": "ten", "ninth": "tenth", "Y": "Z"}),
        ("sentiment", {"The concert was awful": "negative", "The concert was amazing": "positive"}),
        ("code", {"length(items)": "len(items)", "is_even(n)": "n % 2 == 0", "lower(text)": "text.lower()"}),
        ("multiplication", {"7 * 9": "63", "0 * 5": "0"}),
        ("comparison", {"10 or 9": "10", "3 or 7": "7"}),
    ],
)
def test_known_answers_are_right(name: str, known: dict[str, str]) -> None:
    found = answers(name)
    assert {text: found.get(text) for text in known} == known


def test_regular_forms_obey_the_rules_of_spelling() -> None:
    for lemma, past in answers("past_tense").items():
        if past.endswith("ed") and past not in {"fed", "led"}:
            doubled = lemma + lemma[-1] + "ed"
            assert past in {lemma + "ed", lemma + "d", lemma[:-1] + "ied", doubled}, lemma
    for noun, plural in answers("plurals").items():
        if noun.endswith(("s", "x", "ch", "sh")) and noun != "ox":
            assert plural == noun + "es", noun
        if noun.endswith("y"):
            assert plural == (noun + "s" if noun[-2] in "aeiou" else noun[:-1] + "ies"), noun
