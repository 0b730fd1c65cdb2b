"""A conversion whose bits have changed is refused, wherever they are, and never loads as other numbers."""

from __future__ import annotations

import json
import random
import shutil

import jax
import numpy as np
import pytest

from mars_jax import hub
from mars_jax.core import mesh
from mars_jax.core.errors import MarsError
from mars_jax.hub import orbax as checkpoint
from mars_jax.hub.digests import digest, grid
from mars_jax.models import ModelConfig, init_params
from mars_jax.placement import shardings as sharding

CONFIG = ModelConfig(vocab_size=24, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A conversion whose arrays are stored in several blocks, and its params."""
    folder = tmp_path_factory.mktemp("damage")
    params = init_params(CONFIG, jax.random.key(0), scale=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_CHUNK", 2048)
        made = hub.convert(hub.save(folder / "model", CONFIG, params), folder / "made")
    return made, params


@pytest.fixture
def made(intact, tmp_path):
    return shutil.copytree(intact[0], tmp_path / "made")


def flip(file, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def weights_in(directory, array: np.ndarray):
    """The file that holds the first numbers of an array, and where in it."""
    begin = np.asarray(array).ravel()[:4].tobytes()
    return next((f, at) for f in directory.rglob("d/*") if (at := f.read_bytes().find(begin)) >= 0)


def same(ours, theirs) -> bool:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("axes", [None, "data=2,model=4"])
def test_a_flipped_bit_of_a_weight_is_refused_by_name_unless_nothing_is_compared(intact, made, axes):
    shardings = None if axes is None else sharding.params_shardings(CONFIG, mesh.parse_mesh(axes))
    assert same(hub.load(made, shardings=shardings).params, intact[1])
    file, at = weights_in(made, intact[1]["layers"][1]["down"])
    flip(file, at + 5, 3)
    with pytest.raises(
        MarsError, match=r"^layers\.1\.down in .*orbax' is not what was written \(at \[0, 0\]"
    ):
        hub.load(made, shardings=shardings)
    loaded = hub.load(made, shardings=shardings, check=False).params
    assert not same(loaded, intact[1])
    assert same(loaded["layers"][0], intact[1]["layers"][0])


@pytest.mark.slow
def test_no_flipped_bit_of_any_file_loads_as_other_weights(intact, made):
    rng = random.Random(0)
    refused = 0
    files = [
        f for f in sorted(made.rglob("*")) if f.is_file() and f.stat().st_size and f.name != "config.json"
    ]
    for file in files:
        before = file.read_bytes()
        for at in {rng.randrange(len(before)) for _ in range(2)}:
            flip(file, at, rng.randrange(8))
            try:
                assert same(hub.load(made).params, intact[1]), (file, at)
            except MarsError as error:
                assert "\n" not in str(error) and "<bound" not in str(error)
                refused += 1
            file.write_bytes(before)
    assert refused > len(files) / 4  # of the others some are never read


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda m: m["checksums"].pop("embed"), "checksums do not fit embed"),
        (lambda m: m["blocks"]["norm"]["crc32"].append(1), "checksums do not fit norm"),
        (lambda m: m["blocks"]["norm"].pop("shape"), "is not a conversion's"),
        (lambda m: m.pop("blocks"), "is not a conversion's"),
        (lambda m: m.update(blocks=[]), "is not a conversion's"),
        (lambda m: m.update(dtype="float3r"), "is not a conversion's"),
        (lambda m: m.update(int8="no"), "is not a conversion's"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(made, change, expected):
    manifest = json.loads((made / "conversion.json").read_text())
    change(manifest)
    (made / "conversion.json").write_text(json.dumps(manifest))
    with pytest.raises(MarsError, match=expected):
        hub.load(made)


@pytest.mark.parametrize("check", [True, False])
def test_what_cannot_be_read_gets_one_sentence(made, check, capfd):
    shutil.rmtree(made / "orbax" / "ocdbt.process_0")
    with pytest.raises(MarsError, match=r"cannot be read \(.*: convert the checkpoint again\.$") as caught:
        hub.load(made, check=check)
    assert "<bound" not in str(caught.value) and "tensorstore_spec" not in str(caught.value)
    assert "Event loop is closed" not in capfd.readouterr().err


@pytest.mark.parametrize("shape, block", [((5,), (2,)), ((3, 4, 5), (2, 3, 5)), ((2, 2), (2, 2))])
def test_blocks_cover_an_array_once(shape, block):
    count = np.zeros(shape, np.int32)
    for box in grid(shape, block):
        count[tuple(slice(*ends) for ends in box)] += 1
    assert np.all(count == 1)
    made = digest(count, block)
    assert [box for box, _ in made.parts(shape)] == list(grid(shape, block))
    count.flat[-1] += 1
    assert [a == b for a, b in zip(made.blocks, digest(count, block).blocks, strict=True)] == [
        *[True] * (len(made.blocks) - 1),
        False,
    ]
