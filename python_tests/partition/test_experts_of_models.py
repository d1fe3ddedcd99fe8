"""Unedited models with mixtures of experts under tensor parallelism, against themselves in one process."""

import pytest
from partition.test_models import trained_beside_itself
from partition.zoo import MIXTURES


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_spread_and_train_as_in_one_process(two_ranks, name):
    for result in two_ranks.run(trained_beside_itself, name, {}):
        assert result["logits"] <= 1e-5
        assert result["gradients"][0] <= 1e-5, result["gradients"]
        for expected, got in result["losses"]:
            assert got == pytest.approx(expected, rel=1e-5)
        (layers,) = result["report"]["layers"]
        assert layers["experts"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        assert (layers["runs"], layers["schedule"]) == ("across layers", "oases")
