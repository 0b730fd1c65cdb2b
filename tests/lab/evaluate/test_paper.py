"""The recipe of the paper's table: its rows, its plans, and a row to the end with models that are here."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import jax
import pytest

from mars_jax import hub
from mars_jax.lab.commands.benchmark import parse
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.models import eagle_head
from mars_jax.models.eagle_head import EagleConfig
from tests.cli import conftest as checkpoints

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def paper(monkeypatch):
    """The two modules of scripts/paper, which are no package."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "paper"))
    return importlib.import_module("recipe"), importlib.import_module("rows")


def test_every_row_is_planned_and_its_command_parses(paper, capsys):
    """The head and the target of a row are names of docs/heads.md, and the plan is of the row's slice and tree."""
    recipe, rows = paper
    plans = recipe.plans()
    heads = (ROOT / "docs" / "heads.md").read_text()
    assert len(rows.ROWS) == 6
    for row in rows.ROWS:
        plan = plans[row.name]
        assert plan["fits"] and plan["topology"] == row.slice_ and plan["tree"] in ("10-8-60", "10-7-60")
        assert row.mesh == ",".join(f"{name}={size}" for name, size in plan["mesh"].items())
        assert f"`{row.head}`" in heads and f"`{row.target}`" in heads and row.name in CONFIGS
        args = parse(recipe.flags(row, Path("paper")))
        assert (args.tree, args.temperatures, args.thetas) == (rows.TREE, [1.0], [0.9]) and args.chat
        assert len(args.task) == 6 and args.rule.spec == "mars"
    assert recipe.main(["plan", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("mars_jax benchmark") == 6 and "not planned" not in said


@pytest.fixture
def random_pair(tmp_path, monkeypatch):
    """A random target of one layer with a random EAGLE head."""
    monkeypatch.setattr(checkpoints, "CONTEXT", 512)
    target = checkpoints.write_checkpoint(tmp_path / "random", seed=0)
    layer = hub.read_config(target)
    head = EagleConfig(
        version=1,
        layer=layer,
        target_hidden_size=layer.hidden_size,
        draft_vocab_size=layer.vocab_size,
        own_unembed=False,
    )
    params = eagle_head.init_params(head, jax.random.key(2), scale=0.3)
    return str(target), str(hub.save_eagle(tmp_path / "head", head, params))


@pytest.fixture(params=["random", pytest.param("embedded", marks=pytest.mark.slow)])
def stand_in(request, paper):
    """A row whose target and head are here."""
    target, head = "tiny/target", "tiny/eagle3"
    if request.param == "random":
        target, head = request.getfixturevalue("random_pair")
    row = paper[1].ROWS[0]
    return dataclasses.replace(row, name="stand-in", target=target, head=head, mesh=None, dtype="float32")


@pytest.mark.slow
def test_a_row_runs_from_its_command_to_the_table(paper, stand_in, tmp_path, monkeypatch):
    """What the table says is what the benchmark measured, beside what was published."""
    pytest.importorskip("rouge_score")
    recipe, rows = paper
    monkeypatch.setattr(recipe, "TASKS", {"cnn_dm": rows.Task("cnn_dm.jsonl", "")})
    turns = [
        {"question_id": i, "turns": ["the sea", "a story"][i : i + 1], "reference": ["a b c"]}
        for i in range(2)
    ]
    (tmp_path / "cnn_dm.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    small = {"data": tmp_path, "tasks": ["cnn_dm"], "problems": 2, "new_tokens": 4, "tree": "1"}
    assert recipe.run(stand_in, tmp_path, **small) == 0
    # The row's own chat template was used, which is Vicuna's.
    target = hub.outline(str(tmp_path / "stand-in" / "target"))
    assert "USER: a story ASSISTANT:" in target.tokenizer.decode(target.encode("a story", chat=True))
    summary = json.loads((tmp_path / "stand-in" / "run" / "summary.json").read_text())
    arms = {arm["role"]: arm for arm in summary["tables"][0]["arms"]}
    assert {"alone", "strict", "infinite", "rule", "matched", "control"} <= set(arms)
    shown = recipe.table(tmp_path, [stand_in, rows.ROWS[1]]).splitlines()[2:]
    assert "3.12x -> 3.74x" in shown[0] and "5.64 -> 7.20" in shown[0]
    assert f"{arms['strict']['tau']:.2f} -> {arms['rule']['tau']:.2f}" in shown[0]
    assert f"{arms['strict']['speedup']:.2f}x -> {arms['rule']['speedup']:.2f}x" in shown[0]
    assert shown[1].count("not run") == 2
