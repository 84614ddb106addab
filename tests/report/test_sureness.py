from __future__ import annotations

from cs_localize.heads import Head
from cs_localize.report.sureness import often_selected
from tests.report.builders import heads_file


def test_where_whole_kv_groups_were_knocked_out_groups_are_counted_and_expected() -> None:
    heads = heads_file()
    finding = heads.tasks["antonyms"]
    ranking = [
        entry.model_copy(update={"frequency": 0.9 if (head.layer, head.head // 3) in {(4, 0), (9, 2)} else 0.1})
        for entry in finding.ranking
        for head in [Head.parse(entry.head)]
    ]
    tasks = {**heads.tasks, "antonyms": finding.model_copy(update={"ranking": ranking})}
    groups = heads.model_copy(update={"tasks": tasks, "knock_out": "kv_group"})
    assert often_selected(groups, "antonyms") == (
        "2 KV groups selected in at least 75.0% of the resamples. If KV groups without an effect were exchangeable, at "
        "most 2.22 of them would be expected there: a yardstick, not a promise."
    )
    assert often_selected(groups.model_copy(update={"knock_out": "head"}), "antonyms").startswith("6 heads selected")
