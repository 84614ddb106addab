"""An export as plain transformers and plain vLLM compute with it, held against our engines under the ablation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cs_localize.export import export_checkpoint
from cs_localize.heads import Ablation
from cs_localize.measure.protocol import Request
from cs_localize.measure.spec import EngineSpec
from cs_localize.models import random_model, read_shape
from cs_localize.models.files import fingerprint
from cs_localize.outcomes import Item
from tests.measure.process import in_process
from tests.measure.vllm_child import answer_named
from tests.vllm_plain import plain_scores


def request(seed: int, ablation: Ablation) -> Request:
    ids = tuple(int(i) for i in np.random.default_rng(seed).integers(32, 120, 43))
    return Request(Item("random", str(seed), "", "x"), ids[:40], ids[40:], ablation)


@pytest.mark.model
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("removed", ["L0H1,L1H0,L1H3", "L0N1,L0N2,L1N95,L1N17", "L1,L0G0,L0N5"])
def test_plain_transformers_computes_from_an_export_what_the_hf_engine_does_under_the_ablation(
    architecture: str, removed: str, tmp_path: Path
) -> None:
    import torch
    import transformers

    from cs_localize.measure.hf import HFEngine
    from cs_localize.spelling import spell_out

    source = random_model(tmp_path / "source", architecture)
    made = export_checkpoint(str(source), removed, tmp_path / "out")

    engine = HFEngine(source, dtype="float32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32).eval()
    ids = torch.randint(32, 120, (2, 24), generator=torch.Generator().manual_seed(0))
    ablation = Ablation.decode(spell_out(removed, engine.shape))
    with torch.no_grad():
        exported, unablated = plain(ids).logits, engine.model(ids).logits
        with engine.hooks.applied([ablation] * 2):
            masked = engine.model(ids).logits

    assert (exported - masked).abs().max() < 1e-5
    assert (exported - unablated).abs().max() > 1e-2
    assert transformers.AutoTokenizer.from_pretrained(made.path)("a b").input_ids


@pytest.mark.model
@pytest.mark.vllm
def test_plain_vllm_scores_from_an_export_what_the_masked_engine_does_under_the_ablation(tmp_path: Path) -> None:
    source = random_model(tmp_path / "source", "qwen3")
    ablation = Ablation.decode("L0H1,L1H0,L0N3,L1N4,L1N95")
    made = export_checkpoint(str(source), ablation.encode(), tmp_path / "out")
    resources = {"kv_cache_gib": 1, "max_num_seqs": 16}
    spec = EngineSpec("vllm", str(source), fingerprint(source), read_shape(source), "float32", resources=resources)
    masked = [request(seed, ablation) for seed in range(6)]
    asked = {"masked": masked, "unablated": [replace(one, ablation=Ablation()) for one in masked]}

    answers = in_process(answer_named, spec, asked)
    scores = in_process(plain_scores, replace(spec, model_dir=str(made.path)), masked)

    apart = [abs(outcome.score - score) for outcome, score in zip(answers["masked"], scores, strict=True)]
    moved = [abs(outcome.score - score) for outcome, score in zip(answers["unablated"], scores, strict=True)]
    assert max(apart) < 1e-3
    assert max(moved) > 0.1
