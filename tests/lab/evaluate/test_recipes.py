"""Tests of recipes: each one parses and reports its needs, and one runs from a checkpoint server to its table."""

import json

import jax
import pytest

from mars_jax import hub
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.lab import recipes
from mars_jax.lab.commands.benchmark import main, parse
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.lab.recipes import needs
from mars_jax.models import eagle_head
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.utils import catalogue
from mars_jax.utils.errors import MarsError
from tests.cli import conftest as checkpoints
from tests.helpers.served import serving


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_parses_and_its_pair_is_known(name):
    args = parse(["--recipe", name, "--output", "x"])
    paper, tuned = args.parts["paper"], args.parts["tuned"]
    assert paper.tune is None and tuned.tune and paper.rule.spec == tuned.rule.spec == "mars"
    assert paper.draft in {pair.draft for pair in catalogue.pairs(paper.target)}
    assert [str(part.output) for part in (paper, tuned)] == ["x/paper", "x/tuned"]
    recipe = recipes.read_recipe(name)
    if recipe.published:
        assert (paper.tree, paper.temperatures) == (Dynamic(top_k=10, depth=8, nodes=60), [1.0])
        assert len(paper.task) == 6 and paper.chat and paper.controls == "all" and name in CONFIGS


def test_flags_that_are_given_count_instead_of_the_recipe_s():
    overrides = ["--task", "arithmetic", "--draft", "ngram", "--num-draft-tokens", "3", "--tune", "2", "4"]
    args = parse(["--recipe", "qwen3-8b", *overrides, "--problems=7", "--output=x"])
    paper, tuned = args.parts["paper"], args.parts["tuned"]
    assert (paper.draft, paper.num_draft_tokens, paper.tree) == ("ngram", 3, None)
    assert (tuned.tune, tuned.num_draft_tokens, tuned.task) == ([2, 4], None, ["arithmetic"])
    assert paper.problems == tuned.problems == 7 and paper.target == "qwen3-8b"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recipe qwen3-8 --output x", "no recipe 'qwen3-8'"),
        ("--recipe qwen3-8b", "there is no --output"),
        ("--recipe qwen3-8b --output x --controls none", "leave out --controls none"),
        ("--recipe qwen3-8b --output x --verify exact", "needs a lossy rule"),
    ],
)
def test_flags_that_a_recipe_cannot_run_with_are_refused(flags, message):
    with pytest.raises(MarsError, match=message):
        parse(flags.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [("[flags]\ntarget = 'a'", "a target and a draft"), ("nothing", "is no recipe")],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text, message):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(MarsError, match=message):
        recipes.read_recipe(str(tmp_path / "own.toml"))


def test_the_bytes_of_a_pair_are_those_of_its_arrays(tmp_path):
    args = parse(["--recipe", "embedded", "--dtype", "float32", "--output", str(tmp_path)]).parts["tuned"]
    loaded = [hub.load(name, dtype="float32").params for name in ("tiny/target", "tiny/draft")]
    assert needs.weight_bytes(args) == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded))


def test_a_pair_without_room_is_refused_before_weights_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(needs, "_memory", lambda device: 2**20)
    assert main(["--recipe", "embedded", "--problems", "4", "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "the devices here have room for 0.0 GiB: give a smaller --dtype." in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_recipe_runs_from_a_server_to_its_table(tmp_path, monkeypatch, capsys):
    """Use a tiny pair in the layout of Vicuna, whose tokenizer has no chat template."""
    pytest.importorskip("rouge_score")
    monkeypatch.setattr(checkpoints, "CONTEXT", 512)
    target = checkpoints.write_checkpoint(tmp_path / "target", seed=0)
    layer = hub.read_config(target)
    sizes = {"target_hidden_size": layer.hidden_size, "draft_vocab_size": layer.vocab_size}
    config = EagleConfig(version=1, layer=layer, own_unembed=False, **sizes)
    params = eagle_head.init_params(config, jax.random.key(2), scale=0.3)
    head = hub.save_eagle(tmp_path / "head", config, params)
    prompts = [["the sea"], ["a story"]]
    rows = [{"question_id": i, "turns": p, "reference": ["a b"]} for i, p in enumerate(prompts)]
    (tmp_path / "cnn_dm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = recipes.read_recipe("vicuna-13b")
    with serving(tmp_path / "cache", monkeypatch) as server:
        for name, folder in (("lmsys/vicuna-13b-v1.3", target), (recipe.flags["draft"][6:], head)):
            server.repositories[name] = {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}
        flags = ["--recipe", "vicuna-13b", "--task", f"cnn_dm={tmp_path / 'cnn_dm.jsonl'}", "--tree", "2"]
        flags += ["--max-new-tokens", "4", "--tune", "1", "2", "--controls", "paper", "--dtype", "float32"]
        assert main([*flags, "--output", str(tmp_path / "out")]) == 0
        template = hub.outline("vicuna-13b")
    captured = capsys.readouterr()
    assert "USER: a story ASSISTANT:" in template.tokenizer.decode(template.encode("a story", chat=True))
    assert "recipe vicuna-13b: 0.0 GiB of weights" in captured.err
    summary = json.loads((tmp_path / "out" / "paper" / "summary.json").read_text())
    arms = {arm["role"]: arm for arm in summary["tables"][0]["arms"]}
    table = (tmp_path / "out" / "recipe.md").read_text()
    assert captured.out.endswith(table) and "| 3.12x -> 3.74x |" in table and "| 5.64 -> 7.20 |" in table
    assert f"| tau | {arms['strict']['tau']:.2f} -> {arms['rule']['tau']:.2f} |" in table
    tuned = json.loads((tmp_path / "out" / "tuned" / "tuned.json").read_text())
    assert {arm["length"] for arm in tuned["tables"][0]["arms"]} <= {1, 2}
