"""`margin_accept`, compared with a walk in plain Python: every implementation inherits one class of cases."""

import pytest

from kernels_pallas import TpuBlocks, margin_accept
from kernels_pallas.margin_rule import MARGINS
from tests.helpers.accept_cases import Cases


class TestReference(Cases):
    name = "reference"

    @pytest.mark.parametrize("margin", sorted(MARGINS))
    def test_every_margin(self, margin):
        for seed in range(5):
            arguments, options = self.case(seed, 3, 12, 4, 150, sampled=True)
            self.check(*arguments, **options, margin=margin)


class TestXla(Cases):
    name = "xla"


class TestMosaic(Cases):
    name = "mosaic"

    @pytest.mark.parametrize(("nodes", "blocks"), [(8, TpuBlocks(8, 128)), (6, TpuBlocks(8, 256))])
    def test_every_legal_block_gives_the_same(self, nodes, blocks):
        arguments, options = self.case(11, 20, nodes, 3, 300, sampled=True)
        self.check(*arguments, **options, blocks=blocks)

    @pytest.mark.slow
    def test_trees_too_large_for_a_block_are_walked_behind_the_fold(self):
        arguments, options = self.case(12, 9, 140, 5, 40)
        self.check(*arguments, **options)


@pytest.mark.slow
class TestMosaicSimulated(Cases):
    name = "mosaic_simulated"


def test_the_simulated_kernel_has_no_race():
    """Run one short case of the slow class above."""
    suite = TestMosaicSimulated()
    arguments, options = suite.case(1, 9, 8, 3, 300, sampled=True)
    suite.check(*arguments, **options, blocks=TpuBlocks(8, 128))


def test_an_unknown_margin_is_named():
    (logits, tokens, parents, y, controls), _ = TestXla().case(1, 1, 1, 0, 8)
    with pytest.raises(ValueError, match="margin is 'rato': expected one of ratio, gap"):
        margin_accept(logits, tokens, parents, y, controls, max_depth=0, margin="rato")
