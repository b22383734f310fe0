"""`ddp.compress` and `fsdp.compress` take the models of Lightning Fabric."""

import pytest
from processes import results, run

pytest.importorskip("lightning")


def test_models_of_fabric_train_to_the_same_bits_without_loss(tmp_path):
    imports = "ncz_plugins.torch.ddp,ncz_plugins.torch.fsdp,torch._dynamo,lightning"
    for result in results(run("fabric", 2, tmp_path, imports=imports)):
        assert result == {"ddp": True, "compiled ddp": True, "fsdp": True}
