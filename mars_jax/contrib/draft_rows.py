"""The drafters of one paper each, as rows that `specs.DRAFTERS` puts under the library's own. No jax."""

from __future__ import annotations

from mars_jax.specs.drafts import DraftRow

DRAFTERS = (
    DraftRow(
        name="medusa",
        help="Medusa heads of the target",
        loader="mars_jax.contrib.drafters.medusa:load_medusa",
        head=True,
        path=True,
        trees=True,
        samples=True,
        stops=True,
        outlined=("medusa", "mars_jax.contrib.models.medusa_layers:MedusaConfig"),
        paper="2401.10774",
    ),
    DraftRow(
        name="sprinter",
        help="a small model that goes on until its classifier doubts",
        loader="mars_jax.contrib.drafters.systems:load_sprinter",
        path=True,
        samples=True,
        length=20,
        trusts=True,
        paper="2502.04557",
    ),
    DraftRow(
        name="trispec",
        help="a small model, and a proxy that vouches for its drafts",
        loader="mars_jax.contrib.drafters.systems:load_trispec",
        path=True,
        length=24,
        trusts=True,
        paper="2601.23180",
    ),
    DraftRow(
        name="via_sd",
        help="a small model, and the target without some layers, which vouches for its drafts",
        loader="mars_jax.contrib.drafters.systems:load_via_sd",
        path=True,
        length=24,
        trusts=True,
        paper="2606.12243",
    ),
    DraftRow(
        name="replay",
        help="copy from earlier answers, the rows of a file, or from the text so far",
        loader="mars_jax.contrib.drafters.replay:load_replay",
        path=True,
        file=True,
        length=8,
        resizes=True,
        copies=True,
        paper="2509.23232",
    ),
    DraftRow(
        name="dflash",
        help="a DFlash or DSpark head of the target",
        loader="mars_jax.contrib.drafters.dflash:load_dflash",
        head=True,
        path=True,
        trees=True,
        dynamic=True,
        samples=True,
        stops=True,
        block=True,
        outlined=("dflash", "mars_jax.contrib.models.dflash_head:DFlashConfig"),
        paper="2602.06036; trees: 2604.12989",
    ),
)
